"""A DeepSpeed whose private parts are not the tested ones is refused, since its own path saves and loads otherwise."""

from __future__ import annotations

import pytest
from ckpt_fakes import Engine

from ckpt import CheckpointUsageError, DeepSpeedState, loading_without_pickle
from ckpt.upstream import FENCE
from plinth_testing import raises


def test_an_untested_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed  # noqa: F401  (without it an engine is not DeepSpeed's)

    monkeypatch.setitem(FENCE.tested, "deepspeed", "<0.19")
    for call in (lambda: DeepSpeedState(Engine(), print), lambda: loading_without_pickle(Engine()).__enter__()):
        with raises(CheckpointUsageError, remedy="install deepspeed<0.19"):
            call()


def test_a_save_that_reaches_no_checkpoint_engine_is_refused() -> None:
    state = DeepSpeedState(Engine(), lambda folder: None)
    with pytest.raises(CheckpointUsageError):
        state.take()
