"""Run by test_ckpt_deepspeed: two ranks train a tiny tied Qwen3 under DeepSpeed and save checkpoints.

    ckpt_deepspeed_saver.py MODEL OUT STAGE...

For each stage saves step 2 in the background to OUT/zero<stage> while it trains to step 4, and the same step 2 with
DeepSpeed's own save_checkpoint to OUT/plain<stage>; compares the files; resumes from step 2 with
loading_without_pickle, trains again, and compares. OUT/plain<stage>.expected.pt has the weights that DeepSpeed itself
consolidates.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from ckpt_ranks import compare, run_ranks
from transformers.integrations import HfDeepSpeedConfig
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  (once, before the fork)

from ckpt import (
    AsyncSaver,
    Checkpoint,
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


def build(stage: int, model_path: str) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    keep_alive = HfDeepSpeedConfig(config) if stage == 3 else None
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    model.model.norm.weight.requires_grad_(False)  # a frozen weight takes another path through the checkpoint
    decay, rest = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decay if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 else rest).append(parameter)
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    del keep_alive
    return engine


def train(engine: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    ids = torch.randint(0, 64, (1, 8), generator=generator)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return [parameter.detach().clone() for parameter in parameters]


def save(rank: int, stage: int, model_path: str, out: Path) -> None:
    engine = build(stage, model_path)
    manager, plain = CheckpointManager(out / f"zero{stage}"), out / f"plain{stage}"
    actor = DeepSpeedState(
        engine, lambda folder: engine.save_checkpoint(folder, tag="actor", client_state={"num_steps": 2})
    )
    ranks = SaverRanks(num_ranks=2, rank=rank, run_id=f"stage{stage}")
    with AsyncSaver(manager, ranks=ranks, timeout_s=300) as saver:
        train(engine, 1)
        saver.save(1, {"actor": actor})
        train(engine, 2)
        models = {"actor": describe_model(engine.module)}
        state_dicts = {"actor": actor, "rng": capture_rng()}
        saver.save(2, state_dicts, state={"step": 2}, models=models, copy_in_background=True)
        engine.save_checkpoint(str(plain), tag="actor", client_state={"num_steps": 2})
        saver.wait_copied()
        train(engine, 3)
        train(engine, 4)
        expected = weights(engine)
        saver.wait()
    assert savers.deepspeed_async.ENGINE.calls["checkpoint_engine"] > 0
    checkpoint = manager.load(2)
    torch.distributed.barrier()
    compare_files(checkpoint, plain)
    assert checkpoint.state == {"step": 2}
    assert load_state_dict(checkpoint.path / rank_file("rng", rank))["format_version"] == 1
    with loading_without_pickle(engine):
        path, state = engine.load_checkpoint(str(checkpoint.path / "actor"), tag="actor")
    assert zero.deepspeed_load.ENGINE.calls["checkpoint_engine"] > 0
    assert (path is not None, state["num_steps"]) == (True, 2)
    train(engine, 3)
    train(engine, 4)
    assert all(map(torch.equal, weights(engine), expected)), "resumes bit for bit"
    if rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        consolidated = get_fp32_state_dict_from_zero_checkpoint(str(plain), tag="actor")
        torch.save({name: tensor.clone() for name, tensor in consolidated.items()}, f"{plain}.expected.pt")
    torch.distributed.barrier()


def compare_files(checkpoint: Checkpoint, plain: Path) -> None:
    folder = checkpoint.path / "actor"
    ours, theirs = (
        sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        for root in (folder, plain)
    )
    assert ours == theirs
    for name in ours:
        if name.endswith(".pt"):
            compare(*(torch.load(root / name, weights_only=False) for root in (folder, plain)), name)
        else:
            assert (folder / name).read_bytes() == (plain / name).read_bytes(), name


def save_stages(model_path: str, out: Path, stages: list[int], rank: int) -> None:
    for stage in stages:
        save(rank, stage, model_path, out)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    run_ranks(partial(save_stages, sys.argv[1], folder, list(map(int, sys.argv[3:]))), folder)
