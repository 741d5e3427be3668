"""The example's properties find every bug that is planted in the trainer that they test, and accept it without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TRAINER = (EXAMPLES / "compact_grpo.py").read_text()
PROPERTIES = (EXAMPLES / "test_compact_grpo.py").read_text()
BUGS = {
    "log-probs are shifted by one token": (
        "logits_BLV = model(input_ids_BL)[:, :-1]",
        "logits_BLV = model(input_ids_BL)[:, 1:]",
    ),
    "the mask covers the last prompt token": (
        "position >= prompt_lens_B[:, None]",
        "position >= prompt_lens_B[:, None] - 1",
    ),
    "padding is in the loss": (" & (position < total_lens_B[:, None])", ""),
    "the mean reward is taken over the wrong axis": (
        "mean_G1 = rewards_GN.mean(dim=1, keepdim=True)",
        "mean_G1 = rewards_GN.mean(dim=0, keepdim=True)",
    ),
    "the standard deviation is taken across groups": ("rewards_GN.std(dim=1, keepdim=True)", "rewards_GN.std()"),
    "each micro batch takes its own mean": (
        ".sum() / num_tokens.clamp(min=1)",
        ".sum() / mask_BL[rows].sum().clamp(min=1) / len(micro_batches)",
    ),
    "the ratio is clipped on one side": ("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(max=1 + clip)"),
    "the old log-probs carry a gradient": (
        "log_probs.detach() if old_log_probs is None",
        "log_probs if old_log_probs is None",
    ),
    "the KL penalty has the wrong sign": (
        "difference = ref_log_probs - log_probs",
        "difference = log_probs - ref_log_probs",
    ),
    "a rank without a signal skips the sums": (
        "        sum_over_ranks(parameter.grad)",
        "        if parameter.grad.any():\n            sum_over_ranks(parameter.grad)",
    ),
}


# The same draws every time; a bug has to be found, but not in its smallest example.
settings.register_profile("planted", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(autouse=True)
def planted_profile() -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.load_profile("planted")
    yield
    settings.load_profile(before)


def failed_property(trainer_source: str) -> str:
    """Name of the example's first property that the trainer fails; empty if it has all."""
    trainer = ModuleType("compact_grpo")
    exec(compile(trainer_source, "compact_grpo.py", "exec"), trainer.__dict__)
    example: dict[str, Any] = {"__name__": "example", "__file__": str(EXAMPLES / "test_compact_grpo.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "compact_grpo", trainer)
        exec(compile(PROPERTIES, "test_compact_grpo.py", "exec"), example)
    for name, test in example.items():
        if name.startswith("test_") and hasattr(test, "hypothesis"):
            try:
                test()
            except Exception:
                return name
    return ""


def test_the_trainer_without_a_bug_passes() -> None:
    assert failed_property(TRAINER) == ""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    old, new = BUGS[bug]
    assert TRAINER.count(old) == 1
    assert failed_property(TRAINER.replace(old, new))
