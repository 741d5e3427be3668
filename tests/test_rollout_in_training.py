"""What a user plugs into rollout, and what happens to it, on the real stack: tools, rewards, a server that dies."""

import csv
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_tools_and_a_users_reward_through_a_killed_server_until_sigterm(
    tmp_path: Path, start_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO / "packages" / "rl_runtime" / "tests"))
    app = start_app(
        tmp_path,
        "preset=calculator",
        "trainer.total_training_steps=500",
        "trainer.val_before_train=false",
        "warm_start.steps=20",
        "task.num_demonstrations=2000",
        "batch.train_batch_size=8",
        "batch.mini_batch_size=4",
        "sampling.n=4",
        "reward.function=rl_runtime_user_functions:length_reward",
        "actor.optim.lr=1e-3",
    )
    app.wait_for("s/step")
    (server,) = [p for p in app.children("_serve.py") if "_supervise.py" not in " ".join(p.cmdline())]
    server.kill()
    app.wait_for("rollout server 0 restarted")
    app.wait_for("s/step")
    app.wait_for("s/step")
    app.process.send_signal(signal.SIGTERM)
    assert app.finish() == 143, app.output
    assert not app.survivors()

    (run,) = tmp_path.iterdir()
    with (run / "metrics.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    assert float(rows[-1]["rollout/num_restarts"]) == 1
    for row in rows:
        assert float(row["rollout/num_samples"]) == 32, "a sample was lost"
        assert float(row["rollout/num_failed"]) == 0
        # Context is not counted, and the trainer reads it as the server did. A server with the weights of its model
        # folder, or of another version, would differ by tenths.
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
    assert max(float(row["rollout/num_turns"]) for row in rows) > 1
    assert min(float(row["actor/grad_norm"]) for row in rows) > 0
    samples = [
        json.loads(line) for path in (run / "rollouts").iterdir() for line in path.read_text().splitlines() if line
    ]
    called = [sample for sample in samples if sample["num_context_tokens"]]
    assert called
    for sample in samples:
        assert sample["reward"] == len(sample["response"].split())
        assert sample["version_spans"] == [[sample["step"] - 1, sample["num_response_tokens"]]]
