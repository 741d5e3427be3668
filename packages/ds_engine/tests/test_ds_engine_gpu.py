"""On CUDA with NCCL, one rank per GPU present (two at most)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plinth_testing import free_port, write_tiny_model

NUM_GPUS = min(2, torch.cuda.device_count())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")]


def run_ranks(folder: Path) -> tuple[list[dict], str]:
    worker = str(Path(__file__).with_name("ds_engine_gpu_worker.py"))
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(folder), str(rank), str(NUM_GPUS), port],
            env=os.environ | {"OMP_NUM_THREADS": "4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_GPUS)
    ]
    try:
        results = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [json.loads(line) for out, _ in results for line in out.splitlines() if line.startswith('{"rank"')]
    for line in lines:
        print(line)
    return lines, "\n".join(err[-3000:] for _, err in results)


def test_engine_on_cuda(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, hidden_size=256, num_hidden_layers=4)
    lines, errors = run_ranks(folder)
    by_check: dict[str, list[dict]] = {}
    for line in lines:
        by_check.setdefault(line["check"], []).append(line)
    assert len(by_check.get("done", [])) == NUM_GPUS, errors
    for line in by_check["stages"]:
        assert line["relative_error"] < 1e-4, line
    for line in by_check["attention_error"]:
        assert line["auto"] < 1.25 * line["sdpa"], line
    for fast, exact in zip(by_check["attention"][::3], by_check["attention"][2::3], strict=True):
        assert fast["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-2)  # shared heads' gradients add up
    for line in by_check["compiled"]:
        for compiled, eager in zip(line["compiled"], line["eager"], strict=True):
            assert compiled < 1.25 * eager, line
        assert line["graphs"] <= 6, line
    for line in by_check["prefixes"]:
        assert all(line["same"]), line
        for name in ("in place", "gathered", "kept", "half gathered", "varlen", "compiled"):
            for ours, whole in zip(line["errors"][name], line["errors"]["whole"], strict=True):
                assert ours < 1.1 * whole, (name, line)
    for line in by_check["offload"]:
        assert line["equal"], line
        # fp32 weights and two moments of this rank's shard; with the parameters, at least a shard of these too.
        shard = line["numel"] / NUM_GPUS
        (freed, moved, _, _), (_, moved_all, _, _) = line["freed"]
        assert freed >= moved >= 12 * shard, line
        assert moved_all - moved >= 2 * shard, line
    for line in by_check.get("sequence_parallel", []):
        tolerance = 1e-4 if line["options"].get("dtype") == "float32" else 3e-2
        for alone, shared in zip(line["alone"], line["shared"], strict=True):
            assert shared == pytest.approx(alone, rel=tolerance), line
    for line in by_check["reshape"]:
        assert line["differing"] == [], line
        assert line["losses"][0] == pytest.approx(line["expected"][0], rel=1e-4), line
    for stage in (2, 3):
        plain, on, _ = (x for x in by_check["checkpointing"] if x["stage"] == stage and x["rank"] == 0)
        assert on["peak_mib"] < plain["peak_mib"]
        assert on["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
