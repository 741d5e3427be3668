"""The SFT app on real DeepSpeed ranks."""

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_data import build_tiny_model, write_task
from run_kit.runs import list_runs
from tests.run_folders import column, metrics_rows, rollouts
from tests.test_evaluate import assert_last_checkpoint_is_exported_model, evaluated, responses

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def trained(start_shared_app: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks, with four checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    app = start_shared_app(
        folder,
        *("engine.dtype=float32", "task.num_demonstrations=2000", "supervised.steps=40", "supervised.batch_size=32"),
        *("supervised.val_size=32", "supervised.num_samples=2", "supervised.sample_tokens=4", "trainer.test_freq=20"),
        *("engine.zero.stage=1", "trainer.save_freq=10", "trainer.keep_checkpoints=4"),
        app="sft",
    )
    return app.succeeded()


@pytest.mark.long
def test_the_loss_falls_and_the_model_loads(trained: Path) -> None:
    run = trained
    losses = column(run, "sft/loss")
    held_out = {int(row["step"]): float(row["val/loss"]) for row in metrics_rows(run) if row["val/loss"]}
    assert list(held_out) == [0, 20, 40]
    assert held_out[0] > 3
    assert held_out[40] < 2.2
    records = [record for record in rollouts(run) if record["step"] == 40]
    assert len(records) == 2
    assert all(record["prompt"] and record["response"] and record["demonstrated"] for record in records)
    assert len(losses) == 40
    # 64 words: a model that knows nothing starts near ln 64 = 4.2.
    assert losses[0] > 3
    assert losses[-1] < 2

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    assert model.num_parameters() > 0.3e6
    assert tokenizer.decode(tokenizer("3 + 1 = 4")["input_ids"]) == "3 + 1 = 4"


@pytest.mark.long
def test_a_sweep_pushes_every_checkpoint_to_one_server(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A damaged checkpoint is left out, and the others are evaluated."""
    task = write_task(tmp_path / "task", num_train=1, num_val=12, num_demonstrations=1)
    (trained / "checkpoints" / "step_00000020" / "manifest.json").unlink()
    prompts = (f"data.val={task.val}", "sampling.n=3", "checkpoints.steps=[10,20,40]")
    code, swept = evaluated(tmp_path / "sweep", f"checkpoints.folder={trained}", *prompts)
    printed = capfd.readouterr().out
    assert code == 1, printed
    assert "failed: step_00000020: " in printed
    assert len(list((swept / "servers").iterdir())) == 1
    assert not list(swept.glob("export_*"))
    (state,) = list_runs(tmp_path / "sweep")
    assert state.state == "finished"
    first, last = (responses(swept, f"step_000000{step}") for step in (10, 40))
    assert len(first) == len(last) == 36
    assert first != last, "the second checkpoint was not pushed"
    assert_last_checkpoint_is_exported_model(trained, tmp_path)
    models = json.loads((swept / "summary.json").read_text())["models"]
    assert [one["label"] for one in models] == ["step_00000010", "step_00000040"]


@pytest.mark.thorough
def test_a_run_that_diverges_exports_nothing_and_fails(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(
        tmp_path,
        *("trainer.num_ranks=1", "engine.dtype=float32", "task.num_demonstrations=64", "supervised.val_size=0"),
        *("supervised.steps=30", "supervised.batch_size=8", "supervised.optim.lr=1e9"),
        *("supervised.optim.schedule=constant", "supervised.optim.warmup_steps=0", "trainer.max_skipped_updates=3"),
        app="sft",
    )
    assert app.finish() == 1, app.output
    assert app.output.count("warning: skipped an update of the actor") == 1
    assert "error: trainer.max_skipped_updates: got 3; the actor has diverged: the gradients of" in app.output
    assert "Traceback" not in app.output
    (run,) = tmp_path.iterdir()
    assert not (run / "model").exists()
    assert "Traceback" in (run / "train.log").read_text()
    assert len((run / "metrics.tsv").read_text().splitlines()) < 10


@pytest.mark.thorough
def test_ctrl_c_finishes_the_step_and_writes_the_model_and_twice_it_does_not(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    for name, times in (("once", 1), ("twice", 2)):
        app = start_app(tmp_path / name, "engine.dtype=float32", "supervised.steps=100000", app="sft")
        app.wait_for("step      2/100000")
        for _ in range(times):
            app.press_ctrl_c()
            time.sleep(0.01)
        assert app.finish() == 130, app.output
        assert not app.survivors()
        (recorded,) = list_runs(tmp_path / name)
        assert (recorded.state, recorded.detail) == ("stopped", "by SIGINT")
        assert (tmp_path / name / recorded.name / "model").exists() == (times == 1)
        assert (tmp_path / name / recorded.name / "checkpoints" / "latest").exists() == (times == 1)
        assert (f"stopped by SIGINT after step {recorded.step} of 100000" in app.output) == (times == 1)


@pytest.mark.thorough
def test_a_rank_that_stops_is_named_long_before_the_steps_timeout(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    app = start_app(
        tmp_path,
        *("engine.dtype=float32", "task.num_demonstrations=64", "supervised.val_size=0", "supervised.steps=100000"),
        *("supervised.batch_size=8", "trainer.stall_timeout_s=15"),
        app="sft",
    )
    app.wait_for(" 2/100000")
    stopped = app.children("ray::TrainerWorker")[1]
    stopped.suspend()
    app.wait_for("warning: 'train' makes no progress: rank")
    assert app.finish() == 1, app.output
    rank = re.search(
        rf"error: 'train' (?:makes no progress on any rank|waits for a rank that hangs) "
        rf"\(trainer.stall_timeout_s=15\): rank [01] at .*"
        rf"no heartbeat for \d+ s \({re.escape(socket.gethostname())}, pid {stopped.pid}\)\n",
        app.output,
    )
    assert rank is not None, app.output
    assert "; rank" not in rank.group(), "the other rank waits for it"
    assert not app.survivors(grace_s=10)


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.content ~ ('<eos>' if message.role == 'assistant' else '\\n') }}"
    "{% endfor %}"
)
SHORT = (
    *("supervised.epochs=1", "supervised.batch_size=16", "supervised.num_samples=1", "supervised.sample_tokens=4"),
    *("supervised.optim.lr=0.01", "engine.dtype=float32"),
)
WAYS = {
    "zero3-cpu": [
        *("engine.zero.stage=3", "engine.zero.offload.optimizer=cpu", "engine.zero.offload.param=cpu"),
        "token_budget=128",
    ],
    "sequence-parallel-lora": ["engine.sequence_parallel=2", "engine.zero.stage=3", "engine.lora.rank=8"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_conversations_are_learned_whatever_the_engine(way: str, tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """One epoch of conversations of two turns, with a held-out file, on a model folder with a chat template."""
    import random

    model = build_tiny_model(tmp_path / "base")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    chance = random.Random(0)

    def conversation() -> dict[str, Any]:
        numbers = [chance.randrange(10) for _ in range(4)]
        turns = [
            turn for x, y in (numbers[:2], numbers[2:]) for turn in (("user", f"{x} + {y}"), ("assistant", f"#### {y}"))
        ]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    for name, count in (("train", 317), ("val", 20)):
        rows = [json.dumps(conversation()) for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    files = [f"supervised.files={tmp_path / 'train.jsonl'}", f"supervised.val_files={tmp_path / 'val.jsonl'}"]
    app = start_app(tmp_path / "runs", f"model.path={model}", *files, *SHORT, *WAYS[way], app="sft")
    assert app.finish() == 0, app.output
    assert "317 demonstrations, 20 held out; 20 steps of 16, 1 epochs" in app.output
    before, after = app.output.split("held-out loss      ")[1].split(" after")[0].split(" before, ")
    assert float(after) < float(before) - 1, app.output
    (run,) = (tmp_path / "runs").iterdir()
    last = metrics_rows(run)[-1]
    assert float(last["sft/epoch"]) == 1
    # 13 conversations are left for the last step; each has two turns of two tokens and the end of sequence.
    assert float(last["sft/num_targets"]) == 13 * 2 * 3


@pytest.mark.thorough
def test_uploads_are_kept_as_configured_and_another_host_resumes_from_them(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    common = (
        *("task.num_demonstrations=512", "supervised.val_size=0", "supervised.batch_size=16"),
        *("supervised.optim.warmup_steps=0", "trainer.save_freq=2", "trainer.keep_checkpoints=1"),
        f"trainer.checkpoint_url=file://{tmp_path}/storage",
    )
    first = start_app(tmp_path / "here", *common, "supervised.steps=4", app="sft")
    run = first.succeeded()
    assert f"checkpoints in file://{tmp_path}/storage/{run.name}: step 4\n" in first.output
    again = start_app(tmp_path / "there", *common, "supervised.steps=6", "trainer.resume=auto", app="sft")
    assert again.finish() == 0, again.output
    assert "resumed after step 4" in again.output
    assert "step 5/6" in again.output
    assert "step 4/6" not in again.output
    done = start_app(tmp_path / "here", *common, "supervised.steps=4", "trainer.resume=auto", app="sft")
    assert done.finish() == 2, done.output
    assert "error: supervised.steps: got 4" in done.output
    assert "nothing is left to train" in done.output
