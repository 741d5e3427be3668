"""A DeepSpeed whose private parts are not the tested ones is refused, since its own path saves and loads otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ckpt import CheckpointUsageError, DeepSpeedState, loading_without_pickle, upstream
from ckpt.tools.command_line import main
from ckpt.upstream import PATCHES, records


class Engine:
    """The part of a DeepSpeed engine that both features use."""

    checkpoint_engine: Any = None
    has_moe_layers = False

    def zero_nvme_offload_optimizer(self) -> bool:
        return False

    def load_universal_checkpoint(self) -> bool:
        return False


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was found out about the installed DeepSpeed is forgotten before and after the test."""
    for cached in (upstream._untested, upstream._missing):
        cached.cache_clear()
    yield
    upstream._untested.cache_clear()
    upstream._missing.cache_clear()


def test_every_part_exists_and_its_absence_would_be_found() -> None:
    assert {row["state"] for row in records()} == {"active"}
    for patch in PATCHES:
        for owner, parts in (*patch.replaces.items(), *patch.reads.items()):
            for name, opened in ((part.partition("(")[0], "(" in part) for part in parts):
                assert upstream._missing(owner, f"{name}_") == f"{owner} has no {name}_"
                if opened:
                    assert "takes" in (upstream._missing(owner, f"{name}(_)") or "")


def test_an_untested_deepspeed_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed  # noqa: F401  (without it an engine is not DeepSpeed's)

    monkeypatch.setattr(upstream, "TESTED", "<0.19")
    for call in (lambda: DeepSpeedState(Engine(), print), lambda: loading_without_pickle(Engine()).__enter__()):
        with pytest.raises(CheckpointUsageError, match=r"is not tested \(<0\.19 is\)\. Install deepspeed<0\.19"):
            call()


def test_a_deepspeed_without_checkpoint_engine_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "import_module", lambda _: type("Module", (), {"DeepSpeedEngine": Engine}))
    monkeypatch.delattr(Engine, "checkpoint_engine")
    with pytest.raises(CheckpointUsageError, match="DeepSpeedEngine has no checkpoint_engine"):
        loading_without_pickle(Engine()).__enter__()


def test_a_save_that_reaches_no_checkpoint_engine_is_refused() -> None:
    state = DeepSpeedState(Engine(), lambda folder: None)
    with pytest.raises(CheckpointUsageError, match="nothing was saved"):
        state.take()


def test_the_doctor_lists_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"deepspeed: a tested version (tested: {upstream.TESTED})"
    assert [line.partition(" ")[0] for line in lines[1:]] == ["active", "active"]
