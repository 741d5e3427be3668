"""Two ranks: an engine continues from another's state, handed over in memory. With files: tests/test_reshape.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ds_engine_testkit
import pytest
from ds_engine_testkit import used

from ds_engine import CheckpointError, EngineConfig
from ds_engine.state.reshape import STATE
from plinth_testing import RankPool

pytestmark = pytest.mark.slow


def config(stage: int, *, offload: str = "none", **optim: Any) -> EngineConfig:
    zero = {"param_persistence_elements": 40}
    return ds_engine_testkit.config(stage, optimizer=offload, zero=zero, optim={"weight_decay": 0.01} | optim)


NOT_IN_MEMORY = {name for names in STATE.replaces.values() for name in names} - {"_hp_optimizer_states_linked"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_moves_between_layouts(two_ranks: RankPool, tiny_model: Path, name: str) -> None:
    named = partial(config, name=name)
    pairs = [
        (named(1), named(3)),
        (named(3, offload="cpu"), named(2)),
        (named(2, weight_decay=0), named(1)),
    ]
    for first, second in pairs:
        with used(two_ranks, *([STATE.name] if second.zero.stage < 3 else []), but=NOT_IN_MEMORY):
            results = two_ranks.run("hand_over_state", model_path=str(tiny_model), first=first, second=second)
        for result in results:
            assert result["differing"] == []
            assert result["num_steps"] == 3
            (expected,), (loss,) = result["expected"], result["losses"]
            assert loss == pytest.approx(expected, rel=1e-4)


def test_unreadable_state_is_refused_on_every_rank(two_ranks: RankPool, tiny_model: Path) -> None:
    """Only rank 1 fails to read: rank 0 raises too instead of waiting, and nothing is changed."""
    for result in two_ranks.run("refuse_state", model_path=str(tiny_model), config=config(2)):
        assert isinstance(result["error"], CheckpointError)
        assert "rank 1 of 2): OSError: the disk is gone. Nothing was changed" in str(result["error"])
        assert result["unchanged"]
