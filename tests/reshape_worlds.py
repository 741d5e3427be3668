"""Run by test_reshape: groups of gloo ranks of several sizes, which load what others saved and compare every bit.

    reshape_worlds.py FOLDER

The first group, of 4 ranks, trains and saves; then come groups of 2 and 1. DeepSpeed itself gathers the state, in the
group that saved and in those that loaded. Ranks are forked from this one process, so that the libraries are imported
once.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # every rank would import it
import peft  # noqa: F401
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import plinth_testing
from ckpt import ZeroCheckpoint
from ds_engine import (
    CheckpointError,
    EngineConfig,
    LoraConfig,
    LossOutput,
    OffloadConfig,
    OptimConfig,
    SimpleBatch,
    ZeroConfig,
    ZeroEngine,
    dense_log_prob,
    init_distributed,
    shutdown_distributed,
)
from rl_runtime.ranks.trainer_worker import TrainerWorker

CPU = torch.device("cpu")
State = dict[str, torch.Tensor]
LOSS_SCALE = 1024.0
VOCABULARY = 67  # with 2 and 4 ranks, sizes that do not divide


def config(
    stage: int,
    *,
    optimizer: str = "none",
    param: str = "none",
    dtype: str = "bfloat16",
    lora: LoraConfig | None = None,
    name: str = "adamw",
) -> EngineConfig:
    return EngineConfig(
        zero=ZeroConfig(
            stage=stage, offload=OffloadConfig(optimizer=optimizer, param=param), param_persistence_elements=30
        ),
        # Decay makes two groups of parameters.
        optim=OptimConfig(name=name, lr=1e-2, weight_decay=0.01),
        dtype=dtype,
        lora=lora,
    )


LORA = LoraConfig(rank=3, alpha=6)
SAVED = {
    "zero1": config(1),
    "zero1_cpu": config(1, optimizer="cpu"),
    "zero2": config(2),
    "zero3": config(3),
    "lora": config(2, lora=LORA),
    "fp16": config(2, dtype="float16"),
    "muon": config(2, name="muon"),
}
#: (what is loaded, into what, what it is saved as again)
LOADS: dict[int, list[tuple[str, EngineConfig, str]]] = {
    2: [
        ("zero1", config(2, optimizer="cpu"), "two_of_zero1"),
        ("zero2", config(3), "two_of_zero2"),
        ("zero3", config(1), "two_of_zero3"),
        ("lora", config(3, lora=LORA), ""),
        ("fp16", config(3, dtype="float16"), ""),
        ("muon", config(3, name="muon"), "two_of_muon"),
    ],
    1: [
        ("two_of_zero1", config(1), ""),
        ("two_of_zero2", config(2), ""),
        ("two_of_zero3", config(3), ""),
        ("zero1_cpu", config(3, optimizer="cpu", param="cpu"), ""),
        ("zero3", config(2, dtype="float32"), ""),
        ("two_of_muon", config(1, name="muon"), ""),
    ],
}


def write_model(folder: Path, *, hidden: int = 24) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
    sizes = {"hidden_size": hidden, "intermediate_size": 40, "num_hidden_layers": 1, **heads}
    plinth_testing.write_tiny_model(folder, vocab_size=VOCABULARY, **sizes)


def build(model: Path, settings: EngineConfig) -> ZeroEngine:
    return ZeroEngine.from_pretrained(str(model), settings, log_prob_fn=dense_log_prob, device=CPU)


def train(engine: ZeroEngine, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (8, 9), generator=generator).tolist()
    mine = ids[dist.get_rank() :: dist.get_world_size()]
    batch = SimpleBatch.pack([(row[:3], row[3:]) for row in mine])
    stats = engine.train_mini_batch([batch], lambda out, _: LossOutput(loss=-out.log_probs_K.sum() / 48))
    assert stats.step_applied
    assert stats.grad_norm > 0


def state_of(engine: Any) -> State:
    """fp32 weights and moments of a DeepSpeed engine, as DeepSpeed itself gathers them."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # Stages 1 and 2 look for states when the first of several groups has made its first step: too early.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state = {}
    for parameter, name in engine.param_names.items():
        if not parameter.requires_grad:
            continue
        state[f"{name} weight"] = safe_get_full_fp32_param(parameter).clone()
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1 and "embed" not in name
        is_muons = is_matrix and type(engine.optimizer.optimizer).__name__ == "Muon"
        for kind in ("momentum_buffer",) if is_muons else ("exp_avg", "exp_avg_sq"):
            state[f"{name} {kind}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    return state


def check_equal(actual: State, expected: State, where: str) -> None:
    assert actual.keys() == expected.keys()
    wrong = [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])]
    assert not wrong, f"{where}: {len(wrong)} of {len(actual)} differ: {wrong[:5]}"


def train_and_save(root: Path) -> None:
    """4 ranks: every layout trains, saves and continues; a second engine continues from the files."""
    for name, settings in SAVED.items():
        engine = build(root / "model", settings)
        if settings.dtype == "float16":
            engine._deepspeed.optimizer.loss_scaler.cur_scale = LOSS_SCALE
        if name == "zero2":
            engine.save_checkpoint(root / "untrained", "actor")
        for step in range(2):
            train(engine, step)
        saved = state_of(engine._deepspeed)
        engine.save_checkpoint(root / name, "actor")
        if dist.get_rank() == 0:
            torch.save(saved, root / f"{name}.expected.pt")
        train(engine, 2)
        uninterrupted = state_of(engine._deepspeed)
        engine.close()

        source = ZeroCheckpoint(root / name, "actor")
        engine = build(root / "model", settings)
        assert engine.has_layout(source)
        engine.load_state(source)
        check_equal(state_of(engine._deepspeed), saved, f"{name} by 4 ranks again")
        train(engine, 2)
        check_equal(state_of(engine._deepspeed), uninterrupted, f"{name} one step on")
        engine.close()


def load(root: Path) -> None:
    """Other numbers of ranks: each state is loaded into another layout."""
    for name, settings, again in LOADS[dist.get_world_size()]:
        source = ZeroCheckpoint(root / name, "actor")
        expected = torch.load(root / f"{name}.expected.pt")
        engine = build(root / "model", settings)
        assert not engine.has_layout(source)
        engine.load_state(source)
        where = f"{name} by {dist.get_world_size()} ranks at stage {settings.zero.stage}"
        check_equal(state_of(engine._deepspeed), expected, where)
        assert engine._num_steps == 2
        assert engine._deepspeed.global_steps == 2
        if settings.dtype == "float16":
            scaler = engine._deepspeed.optimizer.loss_scaler
            assert (scaler.cur_scale, scaler.cur_iter) == (LOSS_SCALE, 2)
        dtype = getattr(torch, settings.dtype)
        for tensor_name, tensor in engine.export_parameters() if settings.lora is None else ():
            assert torch.equal(tensor, expected[f"{tensor_name} weight"].to(dtype)), (where, tensor_name)
        if again:
            engine.save_checkpoint(root / again, "actor")
            if dist.get_rank() == 0:
                torch.save(expected, root / f"{again}.expected.pt")
        train(engine, 2)
        engine.close()


def refuse_and_start(root: Path) -> None:
    """Another model's state is refused with nothing changed; one saved before the first step starts from there."""
    engine = build(root / "other_model", SAVED["zero2"])
    train(engine, 0)
    before = state_of(engine._deepspeed)
    with pytest.raises(CheckpointError, match=r"has shape \(67, 24\) in the checkpoint and \(67, 36\) here"):
        engine.load_state(ZeroCheckpoint(root / "zero3", "actor"))
    check_equal(state_of(engine._deepspeed), before, "after a refusal")
    engine.close()

    source = ZeroCheckpoint(root / "untrained")
    assert source.optimizer_steps == 0
    engine = build(root / "model", SAVED["zero3"])
    train(engine, 0)
    engine.load_state(source)
    assert engine._num_steps == 0
    for name, tensor in engine.export_parameters(torch.float32):
        assert torch.equal(tensor, source.whole(name)), name
    for step in range(2):
        train(engine, step)
    expected = torch.load(root / "zero3.expected.pt")
    for name, tensor in state_of(engine._deepspeed).items():  # 4 ranks sum gradients in another order
        torch.testing.assert_close(tensor, expected[name], rtol=0.1, atol=0.02)
    engine.close()


def load_as_a_run_does(root: Path) -> None:
    """rl_runtime's worker detects how to read checkpoints of 4 ranks and of its own number of ranks."""
    worker = TrainerWorker(dist.get_rank(), dist.get_world_size(), device="cpu", num_threads=1)
    expected = torch.load(root / "zero2.expected.pt")
    for folder in (root / "zero2", root / "as_a_run"):
        worker.build("actor", str(root / "model"), SAVED["zero2"], 10)
        worker.load("actor", str(folder), "actor")
        check_equal(state_of(worker._engines["actor"]._deepspeed), expected, f"TrainerWorker, {folder.name}")
        worker._engines["actor"].save_checkpoint(root / "as_a_run", "actor")
        worker.start_from("actor", str(folder))
        check_equal(state_of(worker._engines["actor"]._deepspeed), expected, f"a new run, {folder.name}")
        assert worker._engines["actor"]._num_steps == 0
    assert worker._engines["actor"].has_layout(ZeroCheckpoint(root / "as_a_run", "actor"))
    worker.drop("actor")


def run_jobs(jobs: list[Callable[[Path], None]], root: Path, rank: int) -> None:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    init_distributed(rank, int(os.environ["WORLD_SIZE"]), address, port, CPU, timeout_s=300.0)
    for job in jobs:
        job(root)
    shutdown_distributed()


def run_ranks(size: int, jobs: list[Callable[[Path], None]], root: Path) -> None:
    plinth_testing.run_ranks(partial(run_jobs, jobs, root), num_ranks=size)
    print(f"{size} ranks: done", flush=True)


if __name__ == "__main__":
    # torch computes in fp16 on any CPU, only slowly, which is why DeepSpeed asks for instructions this one may lack.
    get_accelerator().is_fp16_supported = lambda: True
    folder = Path(sys.argv[1])
    write_model(folder / "model")
    write_model(folder / "other_model", hidden=36)
    run_ranks(4, [train_and_save], folder)
    run_ranks(2, [load, refuse_and_start, load_as_a_run_does], folder)
    run_ranks(1, [load], folder)
