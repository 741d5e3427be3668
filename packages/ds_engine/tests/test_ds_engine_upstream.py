"""A version of DeepSpeed, torch or PEFT that is not the tested one ends in its own path or in a refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ds_engine_testkit import make_samples

from ds_engine import EngineConfig, OptimConfig, ZeroConfig
from plinth_testing import RankPool

STAGE_2 = ["gradient accumulation of stage 2", "gradient norm of stages 1 and 2", "weight views of stages 1 and 2"]
STAGE_3 = [
    *("gradient accumulation of stage 3", "gradient norm of stage 3", "weight views of stage 3", "gathers of stage 3"),
    *("layers of stage 3 as leaf modules", "hooks of stage 3's layers", "fetch and release of gathered layers"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "patches"), [(2, STAGE_2), (3, STAGE_3)])
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
