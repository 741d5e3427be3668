"""A version of DeepSpeed, torch or PEFT that is not the tested one ends in its own path or in a refusal."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch.distributed as dist
from ds_engine_testkit import make_samples
from ds_engine_upstream_worker import renamed

import ds_engine
from ds_engine import EngineConfig, EngineConfigError, OptimConfig, ZeroConfig
from ds_engine.distributed import SHARED_MEMORY
from ds_engine.guard.collective_guard import COLLECTIVES
from ds_engine.model.lora import OFF
from ds_engine.upstream import FENCE, records
from ds_engine.zero.zero3_gradients import NVME_GRADIENTS
from plinth_base.fence import Patch, forget
from plinth_testing import RankPool, raises

STAGE_2 = ["gradient accumulation of stage 2", "gradient norm of stages 1 and 2"]
STAGE_3 = [
    *("gradient accumulation of stage 3", "gradient norm of stage 3", "gathers of stage 3"),
    *("layers of stage 3 as leaf modules", "hooks of stage 3's layers", "fetch and release of gathered layers"),
]


def test_the_doctor_lists_every_patch() -> None:
    assert {row["state"] for row in records()} <= {"active", "not installed"}
    package = Path(ds_engine.__file__).parent
    paths = [path.relative_to(package.parent) for path in package.rglob("*.py") if "FENCE" in path.read_text()]
    modules = [importlib.import_module(".".join(path.with_suffix("").parts)) for path in paths]
    values = [value for module in modules for value in vars(module).values()]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]
    declared = {id(value) for value in values if isinstance(value, Patch)}
    assert declared == {id(patch) for patch in FENCE.patches}


@pytest.mark.parametrize(
    ("patch", "name", "package"),
    [
        (NVME_GRADIENTS, "_offload_grad_partition_at_boundary", "deepspeed"),
        (NVME_GRADIENTS, "unswapped_gradients", "deepspeed"),
        (OFF, "_disable_adapters", "peft"),
    ],
)
def test_a_renamed_part_without_an_exact_path_is_refused(patch: Patch, name: str, package: str) -> None:
    patch.check()
    with renamed(name, package), raises(EngineConfigError) as caught:
        patch.check()
    assert f"has no {name}" in caught.value.problem
    patch.check()


def test_a_guard_without_torchs_collectives_is_refused() -> None:
    forget()
    with pytest.MonkeyPatch.context() as patch, raises(EngineConfigError):
        patch.delattr(dist.ProcessGroup, "allreduce")
        COLLECTIVES.check()
    forget()


@pytest.mark.slow
def test_ranks_join_without_deepspeeds_shared_memory_operator(two_ranks: RankPool) -> None:
    for calls in two_ranks.run("take_calls"):
        assert calls[SHARED_MEMORY.name]["__compatible_ops__"] == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("stage", "patches"), [(2, STAGE_2), pytest.param(3, STAGE_3, marks=pytest.mark.thorough)])
def test_a_renamed_part_of_deepspeed_changes_no_number(
    two_ranks: RankPool, tiny_model: Path, stage: int, patches: list[str]
) -> None:
    """Every method and attribute that training replaces, one at a time: DeepSpeed's own path, or a refusal."""
    config = EngineConfig(
        zero=ZeroConfig(stage=stage, param_persistence_elements=600, reduce_bucket_bytes=10_000),
        optim=OptimConfig(lr=3e-3, eps=1e-4, weight_decay=0.1),
        dtype="float32" if stage == 3 else "bfloat16",
    )
    samples = make_samples(8, seed=3)
    per_rank = [{"steps": [[samples[rank : rank + 1], samples[rank + 2 : rank + 4]]] * 2} for rank in range(2)]
    common = {"model_path": str(tiny_model), "config": config, "patches": patches}
    outcomes = two_ranks.run("train_with_each_renamed", per_rank, **common)[0]
    refused = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    assert list(refused) == (["untested"] if stage == 3 else []), refused
    for name, (weights, norms, left_out) in ((n, o) for n, o in outcomes.items() if n not in refused):
        assert left_out, name
        assert weights < 1e-5, name
        assert norms < 1e-5, name
