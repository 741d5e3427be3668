"""Supervised training: what the loop draws, validates and saves, and its numbers on real ranks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_journal import Journal

from ds_engine import EngineConfig, OptimConfig, StepStats
from plinth_testing import RankPool, write_tiny_model
from plinth_testing.errors import raises
from rl_data import DataConfig, Demonstration, PromptSampler
from rl_runtime import fine_tuning
from rl_runtime.app.supervised_run import check_lengths, hold_out
from rl_runtime.config import TrainingConfig
from rl_runtime.errors import InputError
from rl_runtime.supervised_job_config import SupervisedJobConfig
from rl_runtime.training.held_out import greedy_responses
from rl_runtime.training.loop import Restart
from rl_runtime.training.supervised_config import FineTuningConfig
from rl_runtime.training.supervised_loop import SupervisedLoop, SupervisedResult

STATS = StepStats(loss=1.0, metrics={}, grad_norm=1.0, lr=1.0, num_micro_batches=1, num_empty_micro_batches=0)


def demonstrations(number: int) -> list[Demonstration]:
    """The response of each is its number."""
    return [Demonstration((1,), (index,)) for index in range(number)]


class Steps(Journal):
    """Model and held-out data too. The signal comes after a number of updates."""

    num_ranks = 2

    def __init__(self, trainer: TrainingConfig, config: FineTuningConfig, num: int, stop_in: int | None = None) -> None:
        super().__init__(trainer, None if stop_in is None else ("learn", stop_in))
        self.config, self.data, self.sampler = config, demonstrations(num), PromptSampler(num, seed=3)
        self.drawn: list[list[int]] = []
        self.states: dict[int, Mapping[str, Any]] = {}
        self.logged: dict[int, dict[str, float]] = {}

    def learn(self, _model: Any, batch: Any) -> StepStats:
        self.drawn.append([one.response_ids[0] for one in batch])
        self.note("learn", len(self.drawn))
        return STATS

    # held-out demonstrations
    def metrics(self, _model: Any) -> dict[str, float]:
        return {"val/loss": 1.0 / (1 + len(self.drawn))}

    def samples(self, _model: Any) -> list[dict[str, Any]]:
        return []

    # checkpoints
    def save(self, step: int, metrics: dict[str, float]) -> None:
        super().save(step, metrics)
        self.states[step] = {"sampler": self.sampler.state_dict(), "metrics": metrics}

    def load(self, checkpoint: Any) -> None:
        self.sampler.load_state_dict(checkpoint.state["sampler"])

    # record
    def log(self, step: int, metrics: dict[str, float], *_: Any, **__: Any) -> None:
        self.logged[step] = metrics

    def log_held_out(self, step: int, *_: Any) -> None:
        self.note("validate", step)

    def rewind(self, step: int, _metrics: Any) -> None:
        self.note("rewind", step)

    def first_values(self, *metrics: str) -> dict[str, float]:
        return dict.fromkeys(metrics, 9.0)

    def run(self, resumed: Any = None, *, held_out: bool = True, restart: Any = None) -> SupervisedResult:
        this: Any = self
        loop = SupervisedLoop(
            self.trainer,
            self.config,
            model=this,
            objective=replace(fine_tuning(this if held_out else None), learn=self.learn),
            examples=self.data,
            sampler=self.sampler,
            checkpoints=this,
            record=this,
        )
        return loop.run(resumed, stop=self.stop, restart=restart)


@given(num=st.integers(1, 40), size=st.integers(1, 12), epochs=st.sampled_from([0.5, 1.0, 2.0, 2.5]), data=st.data())
def test_epochs_see_every_demonstration_alike_and_a_resumed_run_goes_on_where_it_was(
    num: int, size: int, epochs: float, data: st.DataObject
) -> None:
    config = FineTuningConfig(epochs=epochs, batch_size=size)
    whole = Steps(TrainingConfig(save_freq=1), config, num)
    result = whole.run(held_out=False)
    drawn = [one for batch in whole.drawn for one in batch]
    assert len(drawn) == max(1, round(epochs * num))
    assert all(len(batch) == size for batch in whole.drawn[:-1])
    counts = [drawn.count(index) for index in range(num)]
    assert max(counts) - min(counts) <= 1
    assert (result.last_step, result.loss_before) == (len(whole.drawn), None)
    assert whole.logged[result.last_step]["sft/epoch"] == len(drawn) / num
    at = data.draw(st.integers(1, result.last_step))
    again = Steps(TrainingConfig(save_freq=1), config, num)
    again.run(SimpleNamespace(step=at, state={**whole.states[at], "num_ranks": 2}, path="here"), held_out=False)
    assert again.drawn == whole.drawn[at:]
    assert (whole.is_started, again.is_started) == (True, False)


def test_validation_and_checkpoints_come_when_they_are_due() -> None:
    trainer = TrainingConfig(test_freq=2, save_freq=3)
    journal = Steps(trainer, FineTuningConfig(steps=5, batch_size=2), 7)
    result = journal.run()
    assert (result.loss_before, result.loss_after) == (1.0, 1 / 6)
    assert journal.steps("validate") == [0, 2, 4, 5]
    assert journal.steps("save") == [3]
    assert "held-out loss      1.0000 before, 0.1667 after" in result.describe()
    # What a step measured is in its checkpoint, for `keep_best`.
    both = Steps(TrainingConfig(test_freq=2, save_freq=2), FineTuningConfig(steps=4, batch_size=2), 7)
    both.run()
    assert both.states[4]["metrics"]["val/loss"] == 1 / 5


@given(stop_in=st.integers(1, 6), save_freq=st.integers(0, 3))
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint_of_it(stop_in: int, save_freq: int) -> None:
    journal = Steps(TrainingConfig(save_freq=save_freq), FineTuningConfig(steps=6, batch_size=2), 7, stop_in)
    result = journal.run()
    assert (result.last_step, len(journal.drawn)) == (stop_in, stop_in)
    saved = journal.steps("save")
    expected = [step for step in range(1, stop_in + 1) if save_freq and step % save_freq == 0]
    if stop_in < 6 and stop_in not in expected:
        expected.append(stop_in)
    assert saved == expected


def test_a_run_that_lost_its_ranks_says_what_it_repeats_and_keeps_its_first_loss() -> None:
    journal = Steps(TrainingConfig(), FineTuningConfig(steps=2, batch_size=2), 7)
    result = journal.run(restart=Restart(lost_at=0.0, done=0, last=1))
    assert journal.done[0] == ("rewind", 0)
    assert journal.said[0].endswith("; step 1 is taken again")
    assert result.loss_before == 9.0


class CountingModel:
    """The next token is the last one plus one; the batch of a call is kept."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def next_tokens(self, train_batch: Any) -> list[int]:
        batch = train_batch.batch
        self.num_rows.append(batch.num_sequences)
        last_ids: list[int] = batch.input_ids_T[batch.target_index_K].tolist()
        return [token + 1 for token in last_ids]


def test_greedy_responses_end_with_the_end_token_or_at_the_limit() -> None:
    model: Any = CountingModel()
    assert greedy_responses(model, [[5], [1, 8], [9]], max_tokens=3, end=10) == [[6, 7, 8], [9, 10], [10]]
    assert model.num_rows == [3, 2, 1]


def test_held_out_demonstrations_are_chosen_by_the_seed() -> None:
    data = demonstrations(20)
    train, held_out = hold_out(data, 5, seed=1)
    assert (len(train), len(held_out)) == (15, 5)
    assert sorted([*train, *held_out], key=data.index) == data
    assert hold_out(data, 5, seed=1) == (train, held_out)
    assert hold_out(data, 5, seed=2)[1] != held_out
    with raises(InputError, field="supervised.val_size", value=20):
        hold_out(data, 20, seed=1)


def test_demonstrations_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 3}')
    check_lengths(tmp_path, [Demonstration((1,), (2, 3))])
    with raises(InputError, field="supervised.files"):
        check_lengths(tmp_path, [Demonstration((1,), (2, 3)), Demonstration((1, 1), (2, 3))])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"token_budget": 0}, "token_budget"),
        ({"token_budget": 9, "micro_batch_size": 2}, "token_budget"),
        ({"data": DataConfig(train=("a.jsonl",))}, "data.train"),
        ({"data": DataConfig(val=("a.jsonl",))}, "data.val"),
        ({"data": DataConfig(max_val_prompts=3)}, "data.max_val_prompts"),
        ({"engine": EngineConfig(optim=OptimConfig(lr=0.1))}, "engine.optim"),
        (
            {"trainer": TrainingConfig(keep_best=1, best_metric="val/loss", save_freq=2, test_freq=2)},
            "trainer.keep_best",
        ),
        (
            {
                "trainer": TrainingConfig(keep_best=1, best_metric="val/loss", save_freq=3, test_freq=2),
                "supervised": FineTuningConfig(val_size=2),
            },
            "trainer.keep_best",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], field: str) -> None:
    with raises(InputError, field=field):
        SupervisedJobConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"epochs": 0.0}, "epochs"),
        ({"val_size": -1}, "val_size"),
        ({"val_size": 1, "val_files": ("a",)}, "val_size"),
        ({"sample_tokens": 0}, "sample_tokens"),
        ({"max_length": 1}, "max_length"),
        ({"optim": OptimConfig(total_steps=3)}, "optim.total_steps"),
    ],
)
def test_training_that_cannot_work_is_refused(settings: dict[str, Any], field: str) -> None:
    with raises(InputError, field=field):
        FineTuningConfig(**settings)


@pytest.mark.slow
@pytest.mark.long
def test_losses_and_responses_are_those_of_transformers_on_the_exported_model(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    """ZeRO-1, 2 and 3, sequence parallelism, CPU offload, LoRA and NF4; training uses the fused log-prob operator."""
    two_ranks.run("train_supervised", folder=str(write_tiny_model(tmp_path / "model")), out=tmp_path / "out")
