"""Asynchronous rollout: bounded staleness, and every sample trained on once, whatever dies."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.training.ledger import read_samples
from tests.run_folders import TINY_STEPS, check_ledger, exact_metrics, only

pytestmark = pytest.mark.e2e

SMALL = (
    *(*TINY_STEPS, "trainer.num_ranks=1", "rollout.max_model_len=68", "task.num_demonstrations=400"),
    "rollout.max_samples_in_flight=4",  # so that groups are in flight at every push
)


@pytest.mark.long
def test_servers_generate_ahead_and_a_resumed_run_loses_nothing(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    ahead = ("trainer.max_staleness=1", "trainer.save_freq=2")
    first = start_app(tmp_path, *SMALL, *ahead, "trainer.total_training_steps=6", "trainer.experiment=first")
    first.wait_for("step 3/6")  # the checkpoint of step 2 exists, and has groups for steps 3 and 4
    first.kill()
    run = only(tmp_path.glob("first_*"))
    second = start_app(
        tmp_path,
        f"config={run / 'config.yaml'}",
        "trainer.resume=auto",
        f"trainer.resume_from={run}",
        "trainer.experiment=second",
    )
    assert second.finish() == 0, second.output
    assert "algorithm.rollout_correction.mode=truncate" in first.output
    assert "sync.running_requests=keep" in first.output
    rows = read_samples(only(tmp_path.glob("second_*")))
    check_ledger(rows, steps=6, groups=4, samples=4, max_staleness=1)
    assert {row.step - 1 - int(row.oldest_version) for row in rows} == {0, 1}


ADAPTERS = ("actor.lora.rank=4", "oversampling.extra_prompts=2", "trainer.test_freq=2")
COMBINED = {
    "adapters, over-sampling, validation in between": ("grpo", "keep", ADAPTERS),
    "adapters, over-sampling, requests that wait": ("grpo", "wait", ADAPTERS),
    "PPO, a killed server": ("ppo", "wait", ("rollout.num_servers=2",)),
    "a tool, validation in between": ("grpo", "keep", ("preset=calculator", "trainer.test_freq=2")),
    "an environment": ("grpo", "keep", ("preset=game", "rollout.max_model_len=160")),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "requests", "settings"), COMBINED.values(), ids=COMBINED)
def test_servers_generate_ahead_with(
    name: str, requests: str, settings: tuple[str, ...], tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    ahead = ("trainer.max_staleness=1", f"sync.running_requests={requests}", "trainer.total_training_steps=6")
    app = start_app(tmp_path, *SMALL, *settings, *ahead, app=name)
    if "rollout.num_servers=2" in settings:
        app.wait_for("step 2/6")
        app.children("_serve.py")[0].kill()
    run = app.succeeded()
    rows = [row for row in read_samples(run) if row.outcome == "trained"]
    assert max(Counter((row.group, row.sample) for row in rows).values()) == 1, "a sample is there twice"
    per_step = Counter(row.step for row in rows)
    assert set(per_step) == set(range(1, 7))
    assert len(set(per_step.values())) == 1
    assert {row.step - 1 - int(row.oldest_version) for row in rows} == {0, 1}
    metrics = [{name: float(value or 0) for name, value in row.items()} for row in exact_metrics(run).values()]
    mismatches = [row.get("rollout/log_prob_mismatch", 0.0) for row in metrics]
    assert max(mismatches) > 0
    # Tokens of the new weights on a cache that older weights filled differ too, but by no more than the older tokens.
    stale = [row.get("rollout/log_prob_mismatch_stale", 0.0) if requests == "keep" else 0.0 for row in metrics]
    for fresh, limit in zip(mismatches, stale, strict=True):
        assert fresh < max(1e-3, 1.5 * limit), "a token has the version of other weights"


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_kills_of_driver_ranks_and_servers_lose_no_sample(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """A killed driver is started again with `resume=auto`; ranks and servers are replaced by the run itself."""
    steps, strikes, chance = 30, 8, random.Random(os.environ.get("PLINTH_STRIKES_SEED", "1"))
    settings = (
        *SMALL,
        *("trainer.num_ranks=2", "rollout.num_servers=2", "trainer.max_staleness=2", "trainer.save_freq=1"),
        f"trainer.total_training_steps={steps}",
        "trainer.max_restarts=40",
        "trainer.max_server_restarts=40",
        "trainer.resume=auto",
    )
    log: list[str] = []
    while True:
        app = start_app(tmp_path, *settings, f"sync.running_requests={chance.choice(['keep', 'wait'])}")
        app.read_in_background()
        while app.process.poll() is None and len(log) < strikes:
            before = _last_step(tmp_path)
            if not log or chance.random() < 0.8:  # else the next strike may meet the recovery from the last
                while _last_step(tmp_path) == before and app.process.poll() is None:
                    time.sleep(0.2)
            time.sleep(chance.uniform(0.0, 4.0))
            if app.process.poll() is None and (event := _kill(chance, app)):
                log.append(f"step {_last_step(tmp_path)}: {event}")
        code = app.process.wait(timeout=1200)
        if code != -signal.SIGKILL:
            break
        assert not app.survivors(60)
    summary = "\n".join(log)
    print(summary)
    assert code == 0, f"{summary}\n{app.output[-6000:]}"
    assert len(log) == strikes, summary
    rows = read_samples(max(tmp_path.glob("grpo_*"), key=lambda run: run.stat().st_mtime))
    check_ledger(rows, steps=steps, groups=4, samples=4, max_staleness=2)


def _last_step(folder: Path) -> int:
    """The last step that a run has recorded, those of killed drivers too."""
    ledgers = max(folder.glob("grpo_*/samples.tsv"), key=lambda path: path.parent.name, default=None)
    return 0 if ledgers is None else max((row.step for row in read_samples(ledgers.parent)), default=0)


def _kill(chance: random.Random, app: Any) -> str:
    """Kills the driver, a rank or a server; says which."""
    kind = chance.choice(["driver", "rank", "rank", "server", "server"])
    if kind == "driver":
        os.kill(app.process.pid, signal.SIGKILL)
        app.process.wait()
        return kind
    victims = app.children({"rank": "ray::TrainerWorker", "server": "_serve.py"}[kind])
    if not victims:
        return ""
    chance.choice(victims).kill()
    return kind
