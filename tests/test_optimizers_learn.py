"""Muon learns the built-in task in the real app; docs/ds_engine.md has its curve beside AdamW's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_reward_chain import accuracy

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]


def test_muon_learns_the_built_in_task(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(tmp_path, "preset=demo", "actor.optim.name=muon", "actor.optim.lr=5e-4")
    assert app.finish() == 0, app.output
    before, after = accuracy(app.output)
    assert after > before + 0.4, app.output
