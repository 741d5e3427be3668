"""A version of DeepSpeed, torch or PEFT that is not the tested one ends in its own path or in a refusal."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ds_engine_testkit import make_samples
from ds_engine_upstream_worker import renamed

import ds_engine
from ds_engine import EngineConfig, EngineConfigError, OptimConfig, ZeroConfig, upstream
from ds_engine.__main__ import main
from ds_engine.distributed import SHARED_MEMORY
from ds_engine.guard.collective_guard import COLLECTIVES
from ds_engine.model.lora import OFF
from ds_engine.upstream import PATCHES, Patch, records
from ds_engine.zero.zero3_gradients import NVME_GRADIENTS
from plinth_testing import RankPool

STAGE_2 = ["gradient accumulation of stage 2", "gradient norm of stages 1 and 2", "weight views of stages 1 and 2"]
STAGE_3 = [
    *("gradient accumulation of stage 3", "gradient norm of stage 3", "weight views of stage 3", "gathers of stage 3"),
    *("layers of stage 3 as leaf modules", "hooks of stage 3's layers", "fetch and release of gathered layers"),
]


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was found out about the installed packages is forgotten before and after the test."""
    for cached in (upstream._untested, upstream._missing, upstream._mentioned):
        cached.cache_clear()
    yield
    upstream._untested.cache_clear()
    upstream._missing.cache_clear()
    upstream._mentioned.cache_clear()


@pytest.fixture
def made() -> Iterator[list[Patch]]:
    """Patches that a test makes are taken out of the record."""
    number = len(PATCHES)
    yield PATCHES
    del PATCHES[number:]


class Upstream:
    """A class of another package."""

    def step(self, scale: float, closure: object = None) -> float:
        self.last = scale
        return scale


def a_patch(step: str = "step(scale, closure)", *, stock: bool = True, owner: str = "Upstream") -> Patch:
    return Patch(name="a step", reason="a test", stock=stock, replaces={f"torch:{owner}": (step, "last")})


def test_replacements_are_counted_and_restored(made: list[Patch]) -> None:
    patch, target = a_patch(), Upstream()
    target.last = 0.0
    restore = patch.replace(target, step=lambda scale: 2 * scale, last=7.0)
    assert [target.step(3.0), target.step(4.0)] == [6.0, 8.0]
    assert target.last == 7.0
    assert patch.calls == {"step": 2, "last": 1}
    restore()
    assert vars(target) == {"last": 0.0}
    assert target.step(3.0) == 3.0
    patch.replace(target, step=len)
    assert target.step is len
    with pytest.raises(AssertionError, match="does not declare"):
        patch.replace(target, backward=len)


@pytest.mark.parametrize(
    ("step", "owner", "tested", "problem"),
    [
        ("step(scale, closure)", "Upstream", None, None),
        ("last|newest", "Upstream", None, None),
        ("stop()", "Upstream", None, "torch:Upstream has no stop"),
        ("step(closure, scale)", "Upstream", None, "torch:Upstream.step takes (scale, closure), not (closure, scale)"),
        ("step(scale)", "Upstream", None, "torch:Upstream.step takes (scale, closure), not (scale)"),
        (
            *("step(scale, closure)", "Downstream", None),
            "torch:Downstream cannot be imported (module 'torch' has no attribute 'Downstream')",
        ),
        ("step(scale, closure)", "Upstream", "<2", f"torch {version('torch')} is not tested (<2 is)"),
    ],
)
def test_an_untested_version_a_missing_name_and_another_signature_are_refused(
    step: str,
    owner: str,
    tested: str | None,
    problem: str | None,
    made: list[Patch],
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where upstream's own path is exact it is used, which is logged once."""
    monkeypatch.setattr(torch, "Upstream", Upstream, raising=False)
    if tested is not None:
        monkeypatch.setitem(upstream.TESTED, "torch", tested)
    monkeypatch.setattr(upstream, "_said", set())
    patch = a_patch(step, owner=owner)
    with caplog.at_level(logging.WARNING, logger="ds_engine"):
        assert [patch.check(), patch.check()] == [problem is None] * 2
    assert caplog.messages == ([] if problem is None else [f"a step: upstream's own path is used: {problem}"])
    if problem is not None:
        with pytest.raises(EngineConfigError) as refusal:
            a_patch(step, owner=owner, stock=False).check()
        assert str(refusal.value).startswith(f"a step cannot work: {problem}. Install torch")


def test_every_part_exists_and_its_absence_would_be_found() -> None:
    """With the installed versions: no name or signature passes whatever it is."""
    assert {row["state"] for row in records()} <= {"active", "not installed"}
    package = Path(ds_engine.__file__).parent
    paths = [path.relative_to(package.parent) for path in package.rglob("*.py") if "Patch" in path.read_text()]
    modules = [importlib.import_module(".".join(path.with_suffix("").parts)) for path in paths]
    declared = {id(value) for module in modules for value in vars(module).values() if isinstance(value, Patch)}
    assert declared == {id(patch) for patch in PATCHES}, "a patch that the doctor does not list"
    for patch in PATCHES:
        for owner, parts in (*patch.replaces.items(), *patch.reads.items()):
            for part in parts if "not installed" not in (patch.problem() or "") else ():
                name, opened, _ = part.partition("(")
                assert upstream._missing(owner, name.replace("|", "_|") + "_") is not None, (owner, part)
                if opened:
                    assert "takes" in (upstream._missing(owner, f"{name}(_)") or ""), (owner, part)


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
    with renamed(name, package), pytest.raises(EngineConfigError, match=f"has no {name}"):
        patch.check()
    patch.check()


def test_a_guard_without_torchs_collectives_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.ProcessGroup, "allreduce")
    with pytest.raises(EngineConfigError, match="ProcessGroup has no allreduce"):
        COLLECTIVES.check()


def test_the_doctor_lists_versions_and_every_patch(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')} (tested: {upstream.TESTED['torch']})" in lines
    for patch in PATCHES:
        assert any(line.startswith(("active", "not installed")) and patch.name in line for line in lines)


@pytest.mark.slow
def test_ranks_join_without_deepspeeds_shared_memory_operator(two_ranks: RankPool) -> None:
    for calls in two_ranks.run("take_calls"):
        assert calls[SHARED_MEMORY.name]["__compatible_ops__"] == 1


@pytest.mark.slow
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
