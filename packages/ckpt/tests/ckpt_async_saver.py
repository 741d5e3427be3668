"""Run by test_ckpt_async_deepspeed: two ranks write DeepSpeed's checkpoint in the background.

    ckpt_async_saver.py OUT STAGE...

For each stage saves step 2 in the background while it trains to step 4, and the same step 2 with DeepSpeed's own
save_checkpoint; compares the files; resumes from step 2 with loading_without_pickle, trains again, and compares. Writes
its measurements to OUT/rank<r>.json.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from ckpt_ranks import build, compare, run_ranks

from ckpt import (
    AsyncSaver,
    CheckpointManager,
    DeepSpeedState,
    SaverRanks,
    capture_rng,
    describe_model,
    load_state_dict,
    loading_without_pickle,
    rank_file,
    savers,
    zero,
)


def train(engine: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    engine.backward(engine(torch.randn(1, 33, generator=generator).bfloat16()).float().square().mean())
    engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return [parameter.detach().clone() for parameter in parameters]


def run(rank: int, stage: int, out: Path) -> dict[str, float]:
    torch.manual_seed(0)
    engine = build(stage, [torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 7)])
    manager = CheckpointManager(out / f"zero{stage}")
    ranks = SaverRanks(num_ranks=2, rank=rank, run_id=f"stage{stage}")
    actor = DeepSpeedState(
        engine, lambda folder: engine.save_checkpoint(folder, tag="actor", client_state={"num_steps": 2})
    )
    with AsyncSaver(manager, ranks=ranks, timeout_s=300) as saver:
        train(engine, 1)
        saver.save(1, {"actor": actor})
        train(engine, 2)
        models = {"actor": describe_model(engine.module)}
        state_dicts = {"actor": actor, "rng": capture_rng()}
        stall_s = saver.save(2, state_dicts, state={"step": 2}, models=models, copy_in_background=True)
        started = time.perf_counter()
        engine.save_checkpoint(str(out / f"plain{stage}"), tag="actor", client_state={"num_steps": 2})
        plain_s = time.perf_counter() - started
        saver.wait_copied()
        train(engine, 3)
        train(engine, 4)
        expected = weights(engine)
        checkpoint = saver.wait()
    assert checkpoint is not None
    checkpoint = manager.load(2)
    assert checkpoint.state == {"step": 2}
    torch.distributed.barrier()
    plain = out / f"plain{stage}"
    names = sorted(path.relative_to(plain).as_posix() for path in plain.rglob("*") if path.is_file())
    folder = checkpoint.path / "actor"
    assert names == sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in names:
        if name.endswith(".pt"):
            compare(*(torch.load(root / name, weights_only=False) for root in (folder, plain)), name)
        else:
            assert (folder / name).read_bytes() == (plain / name).read_bytes(), name
    assert load_state_dict(checkpoint.path / rank_file("rng", rank))["format_version"] == 1

    assert savers.deepspeed_async.ENGINE.calls["checkpoint_engine"] > 0
    with loading_without_pickle(engine):
        path, state = engine.load_checkpoint(str(folder), tag="actor")
    assert zero.deepspeed_load.ENGINE.calls["checkpoint_engine"] > 0
    assert path is not None
    assert state["num_steps"] == 2
    train(engine, 3)
    train(engine, 4)
    assert all(map(torch.equal, weights(engine), expected)), "resumes bit for bit"
    return {"stall_s": stall_s, "plain_s": plain_s}


def run_stages(out: Path, stages: list[int], rank: int) -> None:
    report = {stage: run(rank, stage, out) for stage in stages}
    (out / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_ranks(partial(run_stages, folder, list(map(int, sys.argv[2:]))), folder)
