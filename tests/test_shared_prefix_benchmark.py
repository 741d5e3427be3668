"""benchmarks/shared_prefix: plans hold the same samples, the search brackets the longest prompt, jobs fail alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared_prefix.measure import (
    MEMORY_KINDS,
    SAMPLES,
    equal_work,
    longest_prompt,
    micro_batches,
    random_batch,
)
from benchmarks.shared_prefix.parts import PARTS, split
from benchmarks.shared_prefix.run import records_of, tables


@given(groups=st.integers(1, 6), prompt=st.integers(32, 80), response=st.integers(1, 24), room=st.integers(0, 3))
def test_both_plans_hold_the_same_targets_and_sharing_computes_each_prompt_once(
    groups: int, prompt: int, response: int, room: int
) -> None:
    batch = random_batch(groups, prompt, response, vocab=50_000)
    budget = (1 + room) * (prompt + SAMPLES * response)
    computed = []
    for shared in (False, True):
        parts, places_K = micro_batches(batch, budget, shared=shared)
        targets_K = torch.cat([part.target_ids_K for part in parts])
        assert places_K.sort().values.equal(torch.arange(batch.num_targets))
        assert batch.target_ids_K[places_K].equal(targets_K)
        assert max(part.num_computed_tokens for part in parts) <= budget
        computed.append(sum(part.num_computed_tokens for part in parts))
    assert computed[0] == groups * SAMPLES * (prompt + response)
    assert computed[1] <= groups * (prompt + SAMPLES * response)


@given(
    fixed=st.floats(0, 50),
    per_token=st.floats(0.001, 0.1),
    quadratic=st.floats(0, 1e-7),
    usable=st.floats(0.9, 1.05),
    most=st.integers(2048, 131072),
)
def test_the_search_brackets_the_longest_prompt(
    fixed: float, per_token: float, quadratic: float, usable: float, most: int
) -> None:
    tried = []

    def peak_of(prompt: int) -> float | None:
        tried.append(prompt)
        peak = fixed + per_token * prompt + quadratic * prompt**2
        return peak if peak <= 100 * usable else None

    fits, fails = longest_prompt(peak_of, capacity=100, first=2048, most=most, limit_s=60)
    assert max(tried) <= most
    assert fits == 0 or peak_of(fits) is not None
    assert fails is None or peak_of(fails) is None
    assert (most if fails is None else fails) - fits <= max(2048 // 8, fits / 50)
    assert len(tried) < 25


def test_without_time_the_search_still_ends_with_a_prompt_that_fits() -> None:
    fits, fails = longest_prompt(lambda n: n if n < 700 else None, capacity=1e6, first=2048, most=4096, limit_s=0)
    assert 0 < fits < 700 <= fails <= 2048


@pytest.mark.parametrize(("groups", "prompt", "response"), [(7, 248, 512), (6, 1024, 512), (1, 16384, 512)])
def test_equal_work_has_the_tokens_and_pairs_of_the_groups(groups: int, prompt: int, response: int) -> None:
    lengths = equal_work(groups, prompt, response)
    pairs = prompt**2 / 2 + SAMPLES * (prompt * response + response**2 / 2)
    assert sum(lengths) == groups * (prompt + SAMPLES * response)
    assert sum(n * n for n in lengths) / 2 == pytest.approx(groups * pairs, rel=0.25 if groups == 1 else 0.03)


def test_a_job_that_ends_its_process_is_recorded_and_the_others_go_on() -> None:
    program = """
import json, sys
for job in sys.argv[sys.argv.index("--jobs") + 1 :]:
    if job == "b":
        sys.exit(7)
    print("noise")
    print(json.dumps({"job": job, "pass": "x"}), flush=True)
    print(json.dumps({"job": job, "job_seconds": 1}), flush=True)
"""
    records = list(records_of([sys.executable, "-c", program], "m", ["a", "b", "c"]))
    assert [record["job"] for record in records] == ["a", "a", "b", "c", "c"]
    assert records[2]["failed_with_exit_code"] == 7
    assert "m, b: exit code 7" in tables(records)


def test_a_kind_that_runs_out_of_memory_has_a_row_without_a_ratio() -> None:
    sizes = {"prompt": 9, "response": 2, "samples": 8, "sample_tokens": 88}
    unshared = {"computed_tokens": 88, "out_of_memory": True}
    shared = {"computed_tokens": 25, "seconds": 0.5, "rounds": 2, "peak_gib": 3.0}
    record = {"model": "m", "job": "W", "pass": "update", **sizes, "unshared": unshared, "shared": shared}
    assert "| 88 | 25 | 3.52 | out of memory | 0.500 (2) | - | - / 3.0 | - | - |" in tables([record])


@pytest.mark.slow
def test_the_command_measures_a_tiny_model_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.shared_prefix.run", "--cpu", "--out", str(tmp_path)]
    subprocess.run([*command, "--cases", "1k", "--rounds", "2", "--longest", "8192"], check=True)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    timed = {record["pass"]: record for record in records if record.get("job") == "1k" and "pass" in record}
    assert list(timed) == ["log_probs", "update"]
    assert timed["log_probs"]["difference"]["max"] < 1e-5
    for record in timed.values():
        assert record["ratio"] == record["unshared"]["seconds"] / record["shared"]["seconds"]
        assert record["unshared"]["computed_tokens"] / record["shared"]["computed_tokens"] == pytest.approx(2.4)
    memory = {record["kind"]: record["longest_prompt"] for record in records if record.get("pass") == "memory"}
    assert list(memory) == list(MEMORY_KINDS)
    assert 464 <= memory["unshared"] <= 480, "eight samples of up to 480 + 32 tokens have 4,096"
    assert memory["unshared, one sample"] == memory["shared"] == 8192 // 16
    assert sum(record.get("pass") == "attention" for record in records) == 15
    assert all(f"## {title}" in (tmp_path / "tables.md").read_text() for title in ("Updates", "Longest", "Attention"))


def test_kernels_are_counted_by_the_operator_that_launched_them_and_gaps_as_idle() -> None:
    def operator(name: str, start: float, stop: float) -> dict[str, Any]:
        return {"cat": "cpu_op", "name": name, "ts": start, "dur": stop - start, "tid": 1}

    def kernel(name: str, launched: float, start: float, dur: float) -> list[dict[str, Any]]:
        ids = {"args": {"correlation": int(launched)}}
        launch = {"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": launched, "dur": 1, "tid": 1}
        return [launch | ids, {"cat": "kernel", "name": name, "ts": start, "dur": dur} | ids]

    events = [
        operator("ds_engine::flash4", 0, 10),
        *kernel("kernel_flash_attn_fwd", 1, 1000, 1000),
        *kernel("_merge_kernel", 2, 2000, 500),
        operator("_LinearLogProb", 20, 30),
        *kernel("nvjet_product", 25, 2500, 2000),
        *kernel("nvjet_product", 35, 6500, 1000),  # after a gap of 2 ms
    ]
    parts, kernels = split(events)
    expected = {"attention": 1, "paths": 0.5, "head": 2, "products": 1, "idle": 2, "wall": 6.5}
    assert parts == dict.fromkeys(PARTS, 0.0) | expected
    assert kernels["head", "nvjet_product"] == 2
