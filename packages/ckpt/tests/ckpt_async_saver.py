"""Run on every rank by test_ckpt_async_deepspeed: DeepSpeed's checkpoint written beside training.

    ckpt_async_saver.py RANK WORLD_SIZE STORE OUT STAGE...

For each stage saves step 2 in the background while training goes on to step 4, and the same step 2 with DeepSpeed's own
save_checkpoint; compares the files; goes back to step 2 with loading_without_pickle, trains again, and compares. Writes
what it measured to OUT/rank<r>.json.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

rank, world_size = int(sys.argv[1]), int(sys.argv[2])
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": "0",
    "WORLD_SIZE": str(world_size),
    "DS_ACCELERATOR": "cpu",
    "MASTER_ADDR": "127.0.0.1",
}

import deepspeed  # noqa: E402
import torch  # noqa: E402

from ckpt import (  # noqa: E402
    AsyncSaver,
    CheckpointManager,
    DeepSpeedState,
    Ranks,
    capture_rng,
    describe_model,
    load_state_dict,
    loading_without_pickle,
    rank_file,
)


def build(stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(0)
    layers = [torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 7)]
    model = torch.nn.Sequential(*layers).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    engine.backward(engine(torch.randn(1, 33, generator=generator).bfloat16()).float().square().mean())
    engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return [parameter.detach().clone() for parameter in parameters]


def compare(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), (where, type(one), type(other))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            compare(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            compare(left, right, f"{where}.{index}")
    elif not hasattr(one, "__dict__"):
        assert one == other, where
    else:
        compare(vars(one), vars(other), where)


def run(stage: int, out: Path) -> dict[str, float]:
    engine = build(stage)
    manager = CheckpointManager(out / f"zero{stage}")
    ranks = Ranks(num_ranks=world_size, rank=rank, run_id=f"stage{stage}")
    actor = DeepSpeedState(
        engine, lambda folder: engine.save_checkpoint(folder, tag="actor", client_state={"num_steps": 2})
    )
    with AsyncSaver(manager, ranks=ranks, patience_s=300) as saver:
        train(engine, 1)
        saver.save(1, {"actor": actor})
        train(engine, 2)
        models = {"actor": describe_model(engine.module)}
        stall_s = saver.save(2, {"actor": actor, "rng": capture_rng()}, state={"step": 2}, models=models)
        started = time.perf_counter()
        engine.save_checkpoint(str(out / f"plain{stage}"), tag="actor", client_state={"num_steps": 2})
        plain_s = time.perf_counter() - started
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

    with loading_without_pickle(engine):
        path, state = engine.load_checkpoint(str(folder), tag="actor")
    assert path is not None
    assert state["num_steps"] == 2
    train(engine, 3)
    train(engine, 4)
    assert all(map(torch.equal, weights(engine), expected)), "goes on bit for bit"
    return {"stall_s": stall_s, "plain_s": plain_s}


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(sys.argv[3], world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # Not needed, and a compiler that is killed half-way leaves a lock that every later process waits for without end.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    report = {stage: run(int(stage), Path(sys.argv[4])) for stage in sys.argv[5:]}
    (Path(sys.argv[4]) / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
