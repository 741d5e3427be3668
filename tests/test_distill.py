"""The distillation app: configuration, the check of the vocabulary, and short runs on the real stack."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import apps.distill.main as distill
from apps.distill.config import DistillConfig
from plinth_testing import raises
from rl_data import DataError, build_tiny_model, check_same_vocabulary, load_tokenizer, write_task
from rl_runtime import InputError
from rl_runtime.training.ledger import read_samples
from run_kit import ConfigError, load_config
from tests.run_folders import check_ledger, metrics_rows

PRESETS = Path(__file__).resolve().parents[1] / "apps" / "distill" / "presets"
SHORT = (
    *("trainer.total_training_steps=2", "warm_start.steps=20", "task.num_val=16", "batch.train_batch_size=8"),
    *("batch.mini_batch_size=4", "sampling.n=2"),
)


def demo(*overrides: str) -> DistillConfig:
    given = ("trainer.num_ranks=2", "rollout.num_servers=1", "trainer.device=cpu", *overrides)
    return load_config(DistillConfig, presets=[PRESETS / "demo.yaml"], overrides=given)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Served too: vLLM's attention on CPUs needs heads of 32 or more."""
    return build_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5, hidden_size=64, num_heads=2, num_layers=3)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("teacher.signal=full", "teacher.on"),
        ("teacher.top_k=0", "teacher.top_k"),
        ("teacher.divergence=forward", "teacher.divergence"),
        ("teacher.beta=1", "teacher.beta"),
        ("teacher.discount=2", "teacher.discount"),
        ("teacher.weight=0", "teacher.weight"),
        ("teacher.server.max_lora_rank=8", "teacher.server.max_lora_rank"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef"),
        ("algorithm.reward_weight=-1", "algorithm.reward_weight"),
        ("sampling.n=1 algorithm.reward_weight=1", "sampling.n"),
        ("sampling.temperature=0.7", "sampling.temperature"),
        ("trainer.ray_address=auto", "teacher.server.urls"),
    ],
)
def test_bad_settings_are_refused_by_key(overrides: str, key: str) -> None:
    with raises(ConfigError, field=key):
        demo(*overrides.split())


def test_a_teacher_that_cannot_teach_is_refused_before_any_process_starts(tmp_path: Path, teacher: Path) -> None:
    other = build_tiny_model(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"apples"', '"planets"'))
    assert demo("sampling.n=1").sampling.n == 1, "one sample of a prompt is enough without a reward"
    for overrides, field in (
        ("trainer.seed=1", "teacher.model"),
        (f"teacher.model={tmp_path}", "teacher.model"),
        (f"teacher.model={other}", "teacher.model"),
        (f"teacher.model={teacher} teacher.gpus=[0]", "teacher.gpus"),
    ):
        with raises(InputError, field=field):
            distill.check(demo(*overrides.split()))
    distill.check(demo(f"teacher.model={teacher}", "teacher.on=ranks", "sampling.temperature=0.7"))


def test_the_same_ids_with_another_end_of_sequence_are_another_vocabulary(teacher: Path) -> None:
    ours, theirs = load_tokenizer(teacher), load_tokenizer(teacher)
    check_same_vocabulary(ours, theirs)
    theirs.eos_token = theirs.pad_token
    with pytest.raises(DataError):
        check_same_vocabulary(ours, theirs)


def finished(app: Any) -> list[dict[str, str]]:
    """The rows of metrics.tsv of a run that ended well and left no process."""
    return metrics_rows(app.succeeded())


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "metrics"),
    [
        (
            ("teacher.signal=top_k", "teacher.top_k=8", "algorithm.reward_weight=0.5"),
            {"teacher/kl", "teacher/divergence"},
        ),
        (("teacher.on=ranks", "teacher.signal=full", "actor.zero.stage=3"), {"teacher/divergence"}),
        (("teacher.on=ranks", "teacher.discount=1"), {"teacher/kl"}),
    ],
)
def test_a_student_trains_on_the_signal_and_reports_its_metrics(
    tmp_path: Path, teacher: Path, start_app: Callable[..., Any], options: tuple[str, ...], metrics: set[str]
) -> None:
    rows = finished(start_app(tmp_path, *SHORT, f"teacher.model={teacher}", *options, app="distill"))
    steps = [row for row in rows if row.get("actor/loss")]
    assert len(steps) == 2
    for row in steps:
        assert {name for name in row if name.startswith("teacher/")} == metrics
        assert all(float(row[name]) > 0 for name in metrics)
        assert float(row["actor/grad_norm"]) > 0


AHEAD = (
    *("preset=demo", "warm_start.steps=0", "task.num_val=16", "batch.train_batch_size=4", "batch.mini_batch_size=2"),
    "sampling.n=2",
    "rollout.max_samples_in_flight=4",  # so that groups are in flight at every push
    *("trainer.num_ranks=1", "trainer.val_before_train=false", "trainer.val_after_train=false"),
    "trainer.max_staleness=2",
)


def steps_of(rows: list[dict[str, str]], app: Any, *, steps: int) -> list[dict[str, str]]:
    """The rows of all steps, of which some trained on samples of an older policy, and none twice."""
    trained = [row for row in rows if row.get("actor/loss")]
    assert len(trained) == steps
    assert max(float(row["staleness/max"]) for row in trained) > 0
    [run] = app.output_dir.glob("*/samples.tsv")
    check_ledger(read_samples(run.parent), steps=steps, groups=4, samples=2, max_staleness=2)
    return trained


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [("teacher.signal=top_k", "teacher.top_k=64"), ("teacher.on=ranks", "sync.running_requests=keep")]
)
def test_a_teacher_that_equals_the_student_agrees_on_every_stale_token(
    tmp_path: Path, teacher: Path, start_app: Callable[..., Any], options: tuple[str, ...]
) -> None:
    """The student keeps its weights, so that a log-prob of another token would be far from its own."""
    from safetensors.torch import load_file, save_file

    scaled = shutil.copytree(teacher, tmp_path / "scaled")
    weights = load_file(scaled / "model.safetensors")
    weights["model.norm.weight"] *= 4.0  # the logits of random weights are nearly equal
    save_file(weights, scaled / "model.safetensors", metadata={"format": "pt"})
    task = write_task(tmp_path / "task", num_train=64, num_val=4, num_demonstrations=4, seed=1)
    same = (f"model.path={scaled}", f"data.train=[{task.train}]", f"teacher.model={scaled}", *options)
    app = start_app(
        tmp_path / "out", *AHEAD, *same, "actor.optim.lr=1e-12", "trainer.total_training_steps=5", app="distill"
    )
    for row in steps_of(finished(app), app, steps=5):
        assert abs(float(row["teacher/kl"])) < 1e-3
        assert 0.5 < float(row["actor/entropy"]) < 3.5, "responses differ, and so do the log-probs of their tokens"
        if "teacher.top_k=64" in options:
            assert float(row["teacher/divergence"]) < 1e-4


@pytest.mark.e2e
@pytest.mark.thorough
def test_a_student_learns_from_stale_samples_while_its_teacher_is_killed(
    tmp_path: Path, teacher: Path, start_app: Callable[..., Any]
) -> None:
    run = (f"teacher.model={teacher}", "trainer.total_training_steps=8", "trainer.save_freq=4")
    app = start_app(tmp_path, *AHEAD, *run, app="distill")
    app.wait_for("step 2/8")
    of_teacher = [process for process in app.children("_serve.py") if str(teacher) in process.cmdline()]
    [server] = [process for process in of_teacher if "_supervise.py" not in " ".join(process.cmdline())]
    server.kill()
    rows = steps_of(finished(app), app, steps=8)
    assert "teacher server 0 died: " in app.output
    assert "teacher server 0 restarted: " in app.output
    assert "algorithm.rollout_correction.mode=truncate" in app.output
    for row in rows:
        assert 0 < float(row["rollout/correction_ess"]) <= 1
        assert float(row["teacher/kl"]) > 0
        assert float(row["actor/grad_norm"]) > 0
