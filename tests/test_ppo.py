"""The PPO app: what it refuses, its advantages by hand, and two steps on the real stack."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apps.ppo.config import PpoConfig
from apps.ppo.main import KlCoefficient, check, num_updates
from run_kit import load_config

DEMO = Path(__file__).resolve().parents[1] / "apps" / "ppo" / "presets" / "demo.yaml"


def load(*overrides: str) -> PpoConfig:
    return load_config(PpoConfig, presets=[DEMO], overrides=list(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.gamma=1.5"], "gamma"),
        (["algorithm.lam=-0.1"], "lam"),
        (["algorithm.value_clip=0"], "value_clip"),
        (["algorithm.critic_warmup_steps=40"], "trainer.total_training_steps"),
        (["algorithm.critic_warmup_steps=-1"], "critic_warmup_steps"),
        (["algorithm.kl_target=0.1"], "kl_coef"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_target=0"], "kl_target"),
        (["algorithm.kl_horizon=0"], "kl_horizon"),
        (["trainer.num_critic_ranks=-1"], "num_critic_ranks"),
        (["trainer.num_critic_ranks=3"], "mini_batch_size"),
        (["critic.sequence_parallel=2", "trainer.num_critic_ranks=1"], "critic.sequence_parallel"),
        (["critic.optim.total_steps=3"], "critic.optim.total_steps"),
        (["critic.optim.schedule=cosine", "critic.optim.warmup_steps=40"], "warmup_steps"),
        (["critic.zero.stage=2", "critic.zero.offload.param=cpu"], "offload.param"),
    ],
)
def test_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(load(*overrides))


def test_the_actor_makes_no_updates_while_the_critic_warms_up() -> None:
    config = load("algorithm.critic_warmup_steps=5", "algorithm.num_epochs=2", "batch.mini_batch_size=8")
    assert num_updates(config) == (2 * 2 * 35, 2 * 2 * 40)


def test_an_adaptive_coefficient_resumes() -> None:
    algorithm = load("algorithm.kl_coef=0.1", "algorithm.kl_target=0.01", "algorithm.kl_horizon=100").algorithm
    kl = KlCoefficient(algorithm)
    kl.update(1.0, 10)  # far above the target: the coefficient rises
    resumed = KlCoefficient(algorithm)
    resumed.load_state_dict(kl.state_dict())
    kl.update(0.0, 10)
    resumed.update(0.0, 10)
    assert resumed.value == kl.value != 0.1


@pytest.mark.slow
@pytest.mark.e2e
def test_three_steps_train_adapters_and_critic(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(
        tmp_path,
        "trainer.total_training_steps=3",
        "algorithm.critic_warmup_steps=1",
        "algorithm.kl_coef=0.05",
        "algorithm.kl_target=0.01",
        "critic.zero.stage=3",
        "actor.lora.rank=4",
        "actor.lora.base_format=nf4",
        "actor.optim.lr=0.02",
        "rollout.max_lora_rank=8",
        "task.kind=calculator",
        "episode.function=apps.grpo.calculator:with_calculator",
        "warm_start.steps=20",
        "task.num_val=32",
        "batch.train_batch_size=8",
        "batch.mini_batch_size=4",
        "sampling.n=2",
        "reward.method=flexible",
        "reward.format_score=0.5",
        "trainer.save_freq=3",
        app="ppo",
    )
    assert app.finish() == 0, app.output
    assert not app.survivors()
    (run,) = tmp_path.iterdir()
    with (run / "metrics.tsv").open() as file:
        _, first, second, third = csv.DictReader(file, delimiter="\t")
    assert not first["actor/grad_norm"], "the critic warms up alone"
    assert float(second["actor/grad_norm"]) > 0
    # Values, advantages and both losses step over what the calculator wrote.
    assert max(float(row["rollout/num_turns"]) for row in (first, second, third)) > 1
    for row in (first, second, third):
        assert float(row["critic/grad_norm"]) > 0
        assert float(row["critic/vf_loss"]) > 0
        # The rounded base, which the servers got once, with the adapters of each step: those of the third have changed.
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
        assert float(row["sync/num_bytes"]) < 100_000
    assert float(first["actor/ref_kl"]) == pytest.approx(0, abs=1e-6), "the actor still is the reference"
    assert float(first["critic/values/mean"]) == pytest.approx(0, abs=0.2), "a new head starts near zero"
    assert float(second["actor/kl_coef"]) < float(first["actor/kl_coef"]) == 0.05
    (checkpoint,) = (run / "checkpoints").glob("*3")
    assert {"actor", "critic"} <= {path.name for path in checkpoint.iterdir()}
    assert "critic_warmup_steps: 1" in (checkpoint / "state.json").read_text()


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_a_critic_on_ranks_of_its_own_computes_the_same_and_resumes(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    """Three steps: the critic on the actor's ranks, on its own ranks, and on its own ranks with a resume."""

    def run(name: str, *overrides: str) -> list[dict[str, str]]:
        app = start_app(
            tmp_path / name,
            "trainer.num_ranks=1",
            "algorithm.critic_warmup_steps=1",
            "trainer.total_training_steps=3",
            "rollout.deterministic=true",
            "warm_start.steps=20",
            "task.num_val=32",
            "batch.train_batch_size=8",
            "batch.mini_batch_size=4",
            "sampling.n=2",
            "reward.method=flexible",
            "reward.format_score=0.5",
            *overrides,
            app="ppo",
        )
        assert app.finish() == 0, app.output
        assert not app.survivors()
        newest = max((tmp_path / name).iterdir())
        with (newest / "metrics.tsv").open() as file:
            measured = ("timing_s/", "perf/", "memory/", "sync/total_s", "rollout/tokens_per_s")
            return [
                {key: value for key, value in row.items() if not key.startswith(measured)}
                for row in csv.DictReader(file, delimiter="\t")
            ]

    shared = run("shared")
    own = run("own", "trainer.num_critic_ranks=2", "critic.zero.stage=1", "trainer.save_freq=2")
    for key in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/values/mean", "critic/score/mean"):
        for ours, theirs in zip(own[1:], shared[1:], strict=True):
            assert float(ours[key] or -1) == pytest.approx(float(theirs[key] or -1), rel=1e-4, abs=1e-6), key
    resumed = run(
        "own", "trainer.num_critic_ranks=2", "critic.zero.stage=1", "trainer.save_freq=2", "trainer.resume=auto"
    )
    assert resumed[-1] == own[-1]
