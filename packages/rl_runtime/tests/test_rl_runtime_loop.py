"""Steps that the loop takes and saves when a signal asks it to stop, and its lines.

The tests of the apps run it on real processes.
"""

import gc
import time
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_journal import Journal

from rl_runtime.config import TrainerConfig
from rl_runtime.rollout.groups import Collected
from rl_runtime.training import loop as loop_module
from rl_runtime.training.loop import LoopResult, TrainingLoop
from rl_runtime.training.record import RunRecord
from run_kit import RunFolderError
from run_kit.memory import MemorySampler
from run_kit.timing import PhaseTimer


class Steps(Journal):
    """Rollouts and servers too."""

    trainer: TrainerConfig
    num_restarts = 0

    def __init__(self, trainer: TrainerConfig, stop_in: tuple[str, int] | None = None, why_not: str = "") -> None:
        super().__init__(trainer, stop_in, why_not)
        self.learned: dict[int, dict[str, float]] = {}
        """Metrics of the update of a step."""

    def collect(self, step: int, _phase: Any) -> Any:
        self.note("collect", step)
        return SimpleNamespace(reason="", note="", batch=lambda: None)

    def published(self, version: int) -> None:
        self.note("published", version)

    def validate(self, step: int, finish: object = None) -> None:
        self.note("validate", step)

    def log_samples(self, step: int, _: Any) -> None:
        self.note("samples", step)

    def push(self, version: int, _phase: Any) -> None:
        self.note("push", version)

    def log_step(self, step: int, *_: Any) -> None:
        self.note("log", step)

    def learn(self, step: int, *_: Any) -> dict[str, float]:
        self.note("learn", step)
        return self.learned.get(step, {})

    def check(self) -> None: ...

    def changing_weights(self, _phase: Any = None) -> AbstractContextManager[None]:
        return nullcontext()


def run(journal: Steps, *, collects: bool = False, is_exact: bool = False) -> LoopResult:
    """`collects`: with a full collection of garbage first, which takes a third of a second."""
    loop = TrainingLoop(
        journal.trainer,
        rollouts=journal,  # type: ignore[arg-type]
        servers=journal,  # type: ignore[arg-type]
        checkpoints=journal,  # type: ignore[arg-type]
        record=journal,  # type: ignore[arg-type]
        is_exact=is_exact,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "rollout_metrics", lambda _: {})
        if not collects:
            patch.setattr(loop_module, "_frozen_objects", nullcontext)
        return loop.run(journal.learn, stop=journal.stop)


@given(
    save_freq=st.integers(0, 4),
    test_freq=st.sampled_from([-1, 1, 2]),
    steps=st.integers(1, 6),
    event=st.sampled_from(["collect", "learn", "push", "save", "validate"]),
    at=st.integers(1, 7),
)
def test_the_step_is_finished_and_saved_once(save_freq: int, test_freq: int, steps: int, event: str, at: int) -> None:
    trainer = TrainerConfig(total_training_steps=steps, save_freq=save_freq, test_freq=test_freq)
    journal = Steps(trainer, (event, at))
    result = run(journal)
    asked = journal.stop.signal is not None
    last = min(at, steps) if asked else steps
    for kind in ("collect", "learn", "log"):
        assert journal.steps(kind) == list(range(1, last + 1)), "each step is whole, and none is taken twice"
    due = [step for step in range(1, last + 1) if save_freq and step % save_freq == 0]
    stopped = asked and last < steps
    assert journal.steps("save") == (sorted({*due, last}) if stopped else due)
    assert result.stopped_after == (last if stopped else None)
    assert result.num_steps == last
    if stopped and event != "validate":
        assert last not in journal.steps("validate"), "nobody waits for a validation"


def test_collections_of_garbage_skip_what_is_older_than_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Steps(TrainerConfig(total_training_steps=2), ("log", 9))
    frozen = []
    gc.unfreeze()  # of the fixture of other tests

    def learn(step: int, *_: Any) -> dict[str, float]:
        frozen.append((gc.get_freeze_count() > 0, any(one is journal.trainer for one in gc.get_objects())))
        return {}

    monkeypatch.setattr(journal, "learn", learn)
    run(journal, collects=True)
    assert frozen == [(True, False)] * 2
    assert gc.get_freeze_count() == 0


def test_a_step_says_how_long_logging_the_one_before_took() -> None:
    logged: list[dict[str, float]] = []
    record = RunRecord(
        SimpleNamespace(  # type: ignore[arg-type]
            log=lambda _, metrics: logged.append(metrics), log_rollouts=lambda *_: time.sleep(0.05)
        ),
        MemorySampler(),
        nullcontext(),  # type: ignore[arg-type]
        SimpleNamespace(placement=SimpleNamespace(num_gpus=1), rank_groups=[Mock(run=lambda _: [{}])]),  # type: ignore[arg-type]
    )
    for step in (1, 2):
        timer = PhaseTimer()
        with timer.step():
            pass
        record.log_step(step, Collected(samples=(), num_failed=0), {}, timer)
    assert logged[0]["perf/log_s"] == 0
    assert logged[1]["perf/log_s"] >= 0.05


def test_a_step_is_written_down_while_the_next_one_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Steps(TrainerConfig(total_training_steps=2))
    collect, is_generating = journal.collect, Event()

    def log_step(step: int, *_: Any) -> None:
        assert step == 2 or is_generating.wait(20), "before the second step"
        journal.note("log", step)

    def collect_and_tell(step: int, phase: Any) -> Any:
        if step == 2:
            is_generating.set()
        return collect(step, phase)

    monkeypatch.setattr(journal, "log_step", log_step)
    monkeypatch.setattr(journal, "collect", collect_and_tell)
    run(journal)
    assert journal.steps("log") == [1, 2]


def test_a_step_that_cannot_be_written_down_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Steps(TrainerConfig(total_training_steps=3))
    monkeypatch.setattr(journal, "log_step", Mock(side_effect=RunFolderError("no room")))
    with pytest.raises(RunFolderError):
        run(journal)
    assert journal.steps("learn") == [1]


def test_a_run_that_cannot_be_saved_says_so() -> None:
    journal = Steps(TrainerConfig(total_training_steps=3), ("learn", 1), why_not="the last 2 updates were skipped")
    assert run(journal).stopped_after == 1
    assert journal.steps("save") == []
    assert journal.said == ["step 1: no checkpoint, because the last 2 updates were skipped"]


def test_servers_of_another_policy_are_named_once_for_steps_in_a_row() -> None:
    """A 4-bit server and its ranks once had nothing in common (mismatch 1.8), and only a metric showed it."""
    journal = Steps(TrainerConfig(total_training_steps=8))
    mismatches = {
        1: 1.8085,
        2: 1.8,
        4: 1.7,
        5: 0.04,
        6: float("nan"),
        7: 0.6,
        8: float("inf"),
    }  # step 3: stale tokens alone
    journal.learned = {
        step: {"rollout/log_prob_mismatch": mismatch, "rollout/mismatch_ess": 0.07}
        for step, mismatch in mismatches.items()
    }
    run(journal)
    assert [line[:8] for line in journal.said] == ["step 1: ", "step 7: "]
    assert "differ by 1.8 on average" in journal.said[0]
    assert "effective sample size is 0.07" in journal.said[0]


@pytest.mark.parametrize(
    ("mismatch", "is_exact", "warns"), [(1e-9, True, True), (0.0, True, False), (0.04, False, False)]
)
def test_one_bit_is_named_where_no_bit_may_differ(mismatch: float, is_exact: bool, warns: bool) -> None:
    journal = Steps(TrainerConfig(total_training_steps=1))
    journal.learned = {1: {"rollout/log_prob_mismatch": mismatch, "rollout/log_prob_mismatch_max": 0.25}}
    run(journal, is_exact=is_exact)
    assert len(journal.said) == warns
    assert not warns or "differ by up to 0.25 (rollout/log_prob_mismatch_max)" in journal.said[0]


def test_steps_without_log_probs_of_servers_say_nothing_about_them() -> None:
    journal = Steps(TrainerConfig(total_training_steps=1))
    run(journal)
    assert journal.said == []
