"""Real ranks against plain PyTorch: the gradient is that of the summed loss, whatever the stage and the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ds_engine_testkit import (
    Reference,
    Sample,
    assert_equal,
    config,
    make_samples,
    pairwise_cases,
    reference_training,
    used,
)

from ds_engine import OffloadConfig
from plinth_testing import RankPool, write_tiny_model

pytestmark = pytest.mark.slow
STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]
SETUPS = {
    "stage": (1, 2, 3),
    "offload": ("none", "cpu"),
    "micro_batches": ((1, False), (4, False), (4, True)),  # how many, step_each_micro
}
"""Every pair of values occurs in a test (plinth_testing.covering)."""


def split(samples: list[Sample], rank: int, num_micro: int) -> list[list[Sample]]:
    """Round robin over two ranks, then over micro batches; some may stay empty."""
    mine = samples[rank::2]
    return [mine[m::num_micro] for m in range(num_micro)]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return reference_training(tiny_model, STEPS)


@pytest.mark.parametrize("case", pairwise_cases(SETUPS, num_short=5))
def test_three_steps_equal_one_fp32_process(
    two_ranks: RankPool, tiny_model: Path, reference: Reference, case: dict[str, Any]
) -> None:
    num_micro, step_each_micro = case["micro_batches"]
    per_rank = [{"steps": [split(s, rank, num_micro) for s in STEPS]} for rank in range(2)]
    with used(two_ranks, *(["number of micro batches, counted by DeepSpeed"] if step_each_micro else [])):
        results = two_ranks.run(
            "train",
            per_rank,
            model_path=str(tiny_model),
            config=config(case["stage"], optimizer=case["offload"], zero={"step_each_micro": step_each_micro}),
        )
    assert_equal(results, reference)
    assert list(results[0]["weights"]) == list(reference[0])
    assert results[1]["weights"] == {}
    stats = results[0]["stats"]
    assert results[1]["stats"] == stats
    assert stats[0].metrics["tokens"] == sum(len(s.ids) - s.num_prompt for s in STEPS[0])
    assert all(s.num_skipped_empty_micro_batches == 0 for s in stats)


@pytest.mark.thorough
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
def test_nvme_offload_equals_one_fp32_process(nvme_ranks: RankPool, tmp_path: Path, param: str) -> None:
    """DeepSpeed leaves shards below 1 MiB in memory. CI runs one case in a step of its own."""
    model = write_tiny_model(tmp_path / "model", hidden_size=640, initializer_range=0.02)
    (tmp_path / "disk").mkdir()
    offload = OffloadConfig(optimizer="nvme", param=param, nvme_path=str(tmp_path / "disk"))
    on_disk = config(3, zero={"offload": offload})
    per_rank = [{"steps": [split(s, rank, 3) for s in STEPS]} for rank in range(2)]
    with used(nvme_ranks, "gradients of states on NVMe"):
        results = nvme_ranks.run("train", per_rank, model_path=str(model), config=on_disk)
    assert_equal(results, reference_training(model, STEPS))
    for error in nvme_ranks.run("train", steps=[], save_to=str(tmp_path), model_path=str(model), config=on_disk):
        assert (error.field, error.value) == ("zero.offload.optimizer", "nvme")
    kinds = {file.parent.parent.name for file in (tmp_path / "disk").rglob("*.swp")}
    assert len(kinds) == (2 if param == "nvme" else 1), kinds
