"""After a step parameters lie where they lay: DeepSpeed points them anew only when their flat weights have moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ds_engine_testkit import make_samples, used

from ds_engine import EngineConfig, OptimConfig, ZeroConfig
from plinth_testing import RankPool

NUM_GROUPS = 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "dtype", "round_robin"), [(1, "float32", False), (2, "bfloat16", True), (3, "bfloat16", False)]
)
def test_parameters_follow_flat_weights_that_moved(
    two_ranks: RankPool, tiny_model: Path, stage: int, dtype: str, round_robin: bool
) -> None:
    """Three steps; the flat weights moved as DeepSpeed's offload and reload do; a step; moved again; a step."""
    per_rank = [{"steps": [[make_samples(2, seed=10 * n + rank)] for n in range(5)]} for rank in range(2)]
    config = EngineConfig(
        zero=ZeroConfig(stage=stage), optim=OptimConfig(lr=3e-3, eps=1e-4, weight_decay=0.1), dtype=dtype
    )
    common = {"model_path": str(tiny_model), "config": config, "round_robin": round_robin}
    theirs = two_ranks.run("train_with_moved_weights", per_rank, ours=False, **common)
    with used(two_ranks, "weight views of stage 3" if stage == 3 else "weight views of stages 1 and 2"):
        results = two_ranks.run("train_with_moved_weights", per_rank, ours=True, **common)
    for result, expected in zip(results, theirs, strict=True):
        # Stage 3's own reload points shards by itself.
        reloaded = NUM_GROUPS if stage < 3 else 0
        assert result["num_pointed"] == [0, reloaded, 0, NUM_GROUPS]
        assert expected["num_pointed"] == [3 * NUM_GROUPS, 2 * reloaded, NUM_GROUPS, NUM_GROUPS]
        assert result["in_place"] == expected["in_place"] == [True] * 4
        assert result["stats"] == expected["stats"]
        assert result["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(result["weights"][name], w) for name, w in expected["weights"].items())
    assert len(results[0]["weights"]) > NUM_GROUPS
