"""The GRPO app on the real stack: DeepSpeed ranks as Ray actors, a real vLLM server, weight sync every step."""

import csv
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.random_model import write_random_model
from ckpt import CheckpointManager
from plinth_testing import wait_until
from run_kit.runs import list_runs
from tests.run_folders import metrics_rows

StartApp = Callable[..., Any]

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def whole_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.tsv that is being written, without the last, which may be half there."""
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t"))[:-1]


def check_that_strangers_are_kept_out(app: Any) -> None:
    """All ports are on loopback, and Ray's refuse who has no token."""
    listeners = app.listeners()
    assert [text for text in listeners if not text.startswith(("127.", "::1:", "::ffff:127."))] == [], listeners
    [(address, _)] = [(address, name) for address, name in listeners.items() if name.startswith("gcs_server")]
    call = grpc.insecure_channel(address.removeprefix("::ffff:")).unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
    with pytest.raises(grpc.RpcError) as refused:
        call(b"", timeout=20)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    [gcs] = app.children("gcs_server")
    call(b"", timeout=20, metadata=[("authorization", f"Bearer {gcs.environ()['RAY_AUTH_TOKEN']}")])


def check_stopped(app: Any, number: str) -> None:
    """The last step was finished and saved, whatever save_freq says; the run says how to resume."""
    (recorded,) = list_runs(app.output_dir)
    assert (recorded.state, recorded.detail) == ("stopped", f"by {number}")
    newest = CheckpointManager(app.output_dir / recorded.name / "checkpoints").newest_good()
    assert newest is not None
    assert newest.step == recorded.step
    stopped, resume = app.output.splitlines()[-2:]
    assert stopped == f"stopped by {number} after step {newest.step}"
    assert resume.startswith(f"To resume after step {newest.step}: python -m apps.grpo.main config=")


def write_verl_rows(path: Path, num_rows: int, words: int) -> None:
    """Rows in verl's format: a chat, the ground truth, and the source that selects the reward."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} plus {i}?" + " please" * words}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        }
        for i in range(num_rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_dead_rank_is_replaced_a_second_ends_the_run_by_name_and_it_resumes(
    tmp_path: Path, start_app: StartApp
) -> None:
    """With a user's model and data, LoRA and its reference model, ZeRO-3, partial rollouts and their correction."""
    model = write_random_model("qwen3-tiny", tmp_path / "model")
    write_verl_rows(tmp_path / "a.parquet", 6, words=0)
    write_verl_rows(tmp_path / "b.parquet", 3, words=40)  # longer than max_prompt_length: skipped
    arguments = [
        f"model.path={model}",
        f"data.train=[{tmp_path / 'a.parquet'},{tmp_path / 'b.parquet'}]",
        *("data.max_prompt_length=64", "batch.train_batch_size=4", "batch.mini_batch_size=2", "sampling.n=2"),
        *("sampling.max_tokens=16", "rollout.max_model_len=128", "rollout.dtype=float32", "rollout.kv_cache_gib=0.1"),
        "algorithm.kl_coef=0.01",
        "algorithm.entropy_coef=0.1",  # a gradient even where all answers are equally wrong
        *("actor.dtype=float32", "actor.zero.stage=3", "actor.lora.rank=4", "actor.optim.lr=1e-3"),
        *("oversampling.extra_prompts=2", "algorithm.rollout_correction.mode=truncate", "trainer.save_freq=1"),
        *("trainer.val_before_train=false", "trainer.max_restarts=1"),
    ]
    app = start_app(tmp_path / "outputs", *arguments, "trainer.total_training_steps=500")
    app.wait_for("s/step")
    check_that_strangers_are_kept_out(app)
    (first,) = (tmp_path / "outputs").iterdir()
    checkpoints = CheckpointManager(first / "checkpoints")
    wait_until(checkpoints.newest_good)
    (server,) = (process.pid for process in app.children("_supervise.py"))
    app.children("ray::TrainerWorker")[0].kill()
    app.wait_for("training again after")
    app.wait_for("tok/s")
    assert re.search(
        r"^rank [01] of 2 died in .*; new ranks continue after step \d+ \(restart 1 of 1\)$", app.output, re.M
    )
    assert [process.pid for process in app.children("_supervise.py")] == [server], "the server is well and stays"
    app.children("ray::TrainerWorker")[0].kill()
    assert app.finish() == 1, app.output
    assert "3 of 9 prompts are longer" in app.output
    assert "reference model: the actor's engine with its LoRA adapters off" in app.output
    _, error, *notes = re.split("^(error: .*)\n", app.output, flags=re.MULTILINE)[-3:]
    notes = notes[-1].splitlines()
    assert re.match("error: rank [01] of 2 died in", error), app.output[-3000:]
    assert f"The traceback is in {first / 'train.log'}" in notes
    assert "trainer.max_restarts is 1: no restart is left" in notes
    steps = [int(row["step"]) for row in metrics_rows(first)]
    assert steps == list(range(1, len(steps) + 1)), "a step is missing, or was recorded twice"
    (resume,) = (note for note in notes if note.startswith("To resume after step"))
    assert not app.survivors()
    (recorded,) = list_runs(tmp_path / "outputs")
    assert (recorded.state, f"error: {recorded.detail}") == ("failed", error[: 7 + 300])
    newest = checkpoints.newest_good()
    assert newest is not None

    command = resume.partition(": python -m apps.grpo.main ")[2].split()
    assert command, resume
    app = start_app(tmp_path / "resumed", *command)
    app.wait_for("tok/s")  # the line of a step; "s/step" is in the path of a checkpoint
    (second,) = (tmp_path / "resumed").iterdir()
    # Which groups a step waits for depends on timing: in three steps some began under the previous policy version.
    wait_until(lambda: len(whole_rows(second / "metrics.tsv")) >= 3)
    app.process.send_signal(signal.SIGTERM)
    assert app.finish() == 143, app.output
    assert not app.survivors()
    check_stopped(app, "SIGTERM")
    rows = whole_rows(second / "metrics.tsv")
    assert int(rows[0]["step"]) == newest.step + 1
    row = max(rows, key=lambda row: float(row["rollout/stale_token_share"]))
    assert float(row["rollout/log_prob_mismatch"]) < 1e-4
    assert float(row["rollout/num_samples"]) == 8
    assert float(row["rollout/stale_token_share"]) > 0
    assert float(row["rollout/log_prob_mismatch_stale"]) > 0
    # No ratio is out of bounds after one small update, so that every token's weight is its ratio.
    stale, fresh_ratio, stale_ratio, weight, outside = (
        float(row[f"rollout/{name}"])
        for name in (
            "stale_token_share",
            "mismatch_ratio_mean",
            "mismatch_ratio_mean_stale",
            "correction_weight_mean",
            "correction_outside_share",
        )
    )
    assert outside == 0
    assert weight == pytest.approx(stale * stale_ratio + (1 - stale) * fresh_ratio, abs=1e-5)
    assert 0.9 < float(row["rollout/correction_ess"]) <= 1
    # The checkpoint's actor has taken a step, so it has left its reference: a fresh actor would still equal it.
    assert float(row["actor/kl"]) > 0
