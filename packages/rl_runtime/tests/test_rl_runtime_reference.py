"""The reference model of a KL term: the actor without its LoRA adapters, or else a frozen engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_engine import EngineConfig, LoraConfig
from plinth_testing import RankPool, write_tiny_model
from rl_runtime.app.job import Job
from rl_runtime.job_config import JobConfig
from rl_runtime.ranks.model_handle import ModelHandle, WithoutAdapters
from rl_runtime.training.run_files import RunFiles


@pytest.mark.slow
@pytest.mark.long
def test_without_adapters_the_actor_computes_what_a_frozen_engine_computes(two_ranks: RankPool, tmp_path: Path) -> None:
    """Bit for bit, at ZeRO stage 2 in float32 and at stage 3 with sequence parallelism in bfloat16."""
    two_ranks.run("compare_references", folder=str(write_tiny_model(tmp_path)))


@pytest.mark.parametrize("lora", [LoraConfig(rank=4), None])
def test_a_job_builds_a_reference_only_where_the_actor_has_no_adapters(lora: LoraConfig | None, tmp_path: Path) -> None:
    built: list[str] = []
    lines: list[str] = []
    ranks: Any = SimpleNamespace(run=lambda method, role, *_: built.append(f"{method.__name__} {role}"))
    stand_in: Any = SimpleNamespace(
        ranks_of=lambda role: ranks, info=lines.append, model_path=tmp_path, nodes=(), image_files=None
    )
    stand_in.image_files = lambda folder: None
    config = JobConfig(actor=EngineConfig(lora=lora))
    stand_ins = dict.fromkeys(("session", "tracker", "inputs", "memory"), stand_in)
    job = Job(config=config, folder=tmp_path, resumed=None, files=RunFiles(config.trainer, tmp_path), **stand_ins)
    actor = job.trained("actor", config.actor, num_updates=1)
    reference = job.reference(actor)
    if lora is None:
        assert isinstance(reference, ModelHandle)
        assert (built, lines) == (["build actor", "build ref"], ["reference model: a frozen copy on the actor's ranks"])
    else:
        assert reference == WithoutAdapters(actor)
        assert built == ["build actor"]
        assert lines == ["reference model: the actor's engine with its LoRA adapters off; no second copy"]
