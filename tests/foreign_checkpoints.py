"""Run by test_foreign_checkpoints: two gloo ranks with plain DeepSpeed engines and ours, which load from each other.

    foreign_checkpoints.py FOLDER some|all  of the cases
    foreign_checkpoints.py FOLDER theirs    one rank trains FOLDER/model at ZeRO-3 and saves FOLDER/theirs, no more

Theirs are made by `deepspeed.initialize` from a JSON config, with DeepSpeed's choice of torch's AdamW. Both sides
compute the same loss, so that a step after a load shows that everything arrived: weights, moments, step counts.
"""

import copy
import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # what every rank would import for itself, and the next one
import peft  # noqa: F401
import torch
import torch.distributed as dist
import transformers
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from reshape_worlds import State, build, check_equal, state_of
from transformers.integrations import HfDeepSpeedConfig

import ckpt.__main__
import plinth_testing
from ckpt import open_deepspeed
from ds_engine import (
    EngineConfig,
    LossOutput,
    OptimConfig,
    SimpleBatch,
    ZeroConfig,
    ZeroEngine,
    config_from_deepspeed,
    init_distributed,
    shutdown_distributed,
)

CPU = torch.device("cpu")
LR, LENGTH, VOCABULARY = 1e-2, 9, 67
CASES = {
    "some": ((3, "float32"), (1, "bfloat16")),
    "all": tuple((stage, dtype) for dtype in ("float32", "bfloat16") for stage in (1, 2, 3)),
}
"""ZeRO stage and dtype; engines of the stage before or behind it load what was saved."""


def theirs(model: Path, stage: int, dtype: str, *, universal: bool = False) -> Any:
    """An engine of somebody who has never heard of us."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
        "checkpoint": {"load_universal": universal},
    }
    keep_alive = HfDeepSpeedConfig(copy.deepcopy(settings)) if stage == 3 else None
    module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=settings)
    del keep_alive
    return engine


def ours(model: Path, stage: int, dtype: Any) -> ZeroEngine:
    zero = ZeroConfig(stage=stage, param_persistence_elements=30)  # type: ignore[arg-type]
    return build(model, EngineConfig(zero=zero, optim=OptimConfig(lr=LR), dtype=dtype))


def tokens(step: int) -> list[int]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, VOCABULARY, (LENGTH,), generator=generator).tolist()


def train_theirs(engine: Any, step: int) -> None:
    ids = torch.tensor([tokens(step)])
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def train_ours(engine: ZeroEngine, step: int) -> None:
    """The mean over the ranks of their mean loss, as DeepSpeed's."""
    ids = tokens(step)
    batch = SimpleBatch.pack([(ids[:1], ids[1:])])
    num = dist.get_world_size() * (LENGTH - 1)
    engine.train_mini_batch([batch], lambda out, _: LossOutput(loss=-out.log_probs_K.sum() / num))


def check_close(actual: State, expected: State, where: str) -> None:
    """A step in fp32 on the same numbers; Adam magnifies the rounding of small gradients."""
    for name, tensor in actual.items():
        difference = (tensor - expected[name]).norm() / expected[name].norm()
        assert difference < 2e-4, f"{where}: {name} differs by {difference:.1e}"


def on_first_rank(job: Any) -> None:
    if dist.get_rank() == 0:
        job()
    dist.barrier()


def convert(folder: Path, out: Path) -> None:
    """DeepSpeed's own converter, without its processes."""
    options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    ds_to_universal.main(Namespace(input_folder=str(folder), output_folder=str(out), **workers, **options))


def into_ours(root: Path, stage: int, dtype: str) -> None:
    """Somebody's engine trains and saves; our engines of another stage load the files and their universal form."""
    name = f"theirs_{stage}_{dtype}"
    engine = theirs(root / "model", stage, dtype)
    for step in range(2):
        train_theirs(engine, step)
    saved = state_of(engine)
    engine.save_checkpoint(str(root / name), tag="global_step2")
    train_theirs(engine, 2)
    after = state_of(engine)
    engine.destroy()
    on_first_rank(lambda: convert(root / name / "global_step2", root / f"{name}_universal"))
    for source in (open_deepspeed(root / name), open_deepspeed(root / f"{name}_universal")):
        here = ours(root / "model", stage % 3 + 1, dtype)
        where = f"{type(source).__name__} of {name}"
        here.load_state(source)
        check_equal(state_of(here.deepspeed), saved, where)
        assert here._num_steps == 2, where
        train_ours(here, 2)
        if dtype == "float32":
            check_close(state_of(here.deepspeed), after, where)
        here.close()


def into_theirs(root: Path, stage: int, dtype: str) -> None:
    """Our engine trains and saves; plain engines load the files, DeepSpeed's universal form of them, and ours."""
    name = f"ours_{stage}_{dtype}"
    here = ours(root / "model", stage, dtype)
    for step in range(2):
        train_ours(here, step)
    saved = state_of(here.deepspeed)
    here.save_checkpoint(root / name, "actor")
    train_ours(here, 2)
    after = state_of(here.deepspeed)
    here.close()

    def write() -> None:
        consolidated = get_fp32_state_dict_from_zero_checkpoint(str(root / name))
        weights = {one.removesuffix(" weight"): tensor for one, tensor in saved.items() if one.endswith(" weight")}
        check_equal({one: consolidated[one].float() for one in weights}, weights, f"zero_to_fp32 of {name}")
        convert(root / name / "actor", root / f"{name}_universal" / "actor")
        (root / f"{name}_universal" / "latest_universal").write_text("actor")
        assert ckpt.__main__.main(["reshape", str(root / name), str(root / f"{name}_reshaped")]) == 0

    on_first_rank(write)
    for folder in (name, f"{name}_universal", f"{name}_reshaped"):
        there = stage % 3 + 1 if folder.endswith("_reshaped") else stage
        engine = theirs(root / "model", there, dtype, universal=folder != name)
        path, client_state = engine.load_checkpoint(str(root / folder))
        assert path is not None, folder
        assert client_state["num_steps"] == 2, folder
        check_equal(state_of(engine), saved, f"{folder} in plain DeepSpeed at stage {there}")
        train_theirs(engine, 2)
        if dtype == "float32":
            check_close(state_of(engine), after, f"{folder} one step on")
        engine.destroy()


def muon_alike(root: Path, stage: int) -> None:
    """DeepSpeed's own Muon and ours, configured by the same file, take the same steps.

    Without clipping, which DeepSpeed applies to Muon's steps, and in fp32 (TORCHDYNAMO_DISABLE: without a compiler).
    """
    params = {"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1, "ns_method": "standard", "torch_adam": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": False},
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
    }
    keep_alive = HfDeepSpeedConfig(copy.deepcopy(settings)) if stage == 3 else None
    module = transformers.AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    decayed, others = [], []
    for parameter in module.parameters():
        (decayed if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 else others).append(parameter)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=copy.deepcopy(settings))
    here = build(root / "model", config_from_deepspeed(settings))
    for step in range(3):
        train_theirs(engine, step)
        train_ours(here, step)
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    check_close(dict(here.export_parameters()), expected, f"Muon at stage {stage}")
    here.close()
    engine.destroy()
    del keep_alive


def run(root: Path, cases: str, rank: int) -> None:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    init_distributed(rank, int(os.environ["WORLD_SIZE"]), address, port, CPU, timeout_s=300.0)
    original_muon.ns_compute_dtype = lambda *_: torch.float32
    for stage in sorted({stage for stage, _ in CASES[cases]}):
        muon_alike(root, stage)
    for stage, dtype in CASES[cases]:
        into_ours(root, stage, dtype)
        into_theirs(root, stage, dtype)
    shutdown_distributed()


def save_theirs(root: Path, rank: int) -> None:
    init_distributed(rank, 1, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), CPU, timeout_s=300.0)
    engine = theirs(root / "model", 3, "float32")
    for step in range(2):
        train_theirs(engine, step)
    engine.save_checkpoint(str(root / "theirs"))
    shutdown_distributed()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["theirs"]:
        VOCABULARY = 60  # ids that the built-in tokenizer has
        plinth_testing.run_ranks(partial(save_theirs, folder), num_ranks=1)
        sys.exit()
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "num_hidden_layers": 1}
    plinth_testing.write_tiny_model(
        folder / "model", vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, **sizes
    )
    plinth_testing.run_ranks(partial(run, folder, sys.argv[2]), num_ranks=2)
    print("all loaded", flush=True)
