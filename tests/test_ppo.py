"""The PPO app: what it refuses, its advantages by hand, and short runs on the real stack."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.ppo.config import PpoConfig
from apps.ppo.main import check, critic_loss, num_updates
from ds_engine import SimpleBatch, ValueOutputs
from plinth_testing import raises
from rl_core import pack
from rl_runtime import advantages
from run_kit import load_config
from tests.run_folders import exact_metrics, metrics_rows

DEMO = Path(__file__).resolve().parents[1] / "apps" / "ppo" / "presets" / "demo.yaml"


def load(*overrides: str) -> PpoConfig:
    return load_config(PpoConfig, presets=[DEMO], overrides=list(overrides))


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["algorithm.gamma=1.5"], "algorithm.gamma"),
        (["algorithm.lam=-0.1"], "algorithm.lam"),
        (["algorithm.value_clip=0"], "algorithm.value_clip"),
        (["algorithm.advantage=rloo"], "algorithm.advantage"),
        (["algorithm.critic_warmup_steps=40"], "algorithm.critic_warmup_steps"),
        (["algorithm.critic_warmup_steps=-1"], "algorithm.critic_warmup_steps"),
        (["algorithm.kl_target=0.1"], "algorithm.kl_target"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_target=0"], "algorithm.kl_target"),
        (["algorithm.kl_horizon=0"], "algorithm.kl_horizon"),
        (["trainer.num_critic_ranks=-1"], "trainer.num_critic_ranks"),
        (["trainer.num_critic_ranks=3"], "batch.mini_batch_size"),
        (["critic.sequence_parallel=2", "trainer.num_critic_ranks=1"], "critic.sequence_parallel"),
        (["critic.optim.total_steps=3"], "critic.optim.total_steps"),
        (["critic.optim.schedule=cosine", "critic.optim.warmup_steps=40"], "critic.optim.warmup_steps"),
        (["critic.zero.stage=2", "critic.zero.offload.param=cpu"], "critic.zero.offload.param"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(overrides: list[str], field: str) -> None:
    with raises(ValueError, field=field):
        check(load(*overrides))


def test_the_actor_makes_no_updates_while_the_critic_warms_up() -> None:
    config = load("algorithm.critic_warmup_steps=5", "algorithm.num_epochs=2", "batch.mini_batch_size=8")
    assert num_updates(config) == (2 * 2 * 35, 2 * 2 * 40)


@pytest.mark.parametrize(("kl_in", "penalty"), [("reward", 0.2), ("loss", 0.0)])
def test_advantages_by_hand(kl_in: str, penalty: float) -> None:
    """The KL to the reference model lowers the rewards; nothing passes from one sample to the next."""
    algorithm = load(
        f"algorithm.kl_in={kl_in}",
        *("algorithm.kl_coef=0.2", "algorithm.kl_kind=k1", "algorithm.gamma=0.9", "algorithm.lam=0.5"),
        "algorithm.whiten_advantages=false",
    ).algorithm
    facts = {"scores": torch.tensor([1.0, 0.0], dtype=torch.float64), "group_ids": torch.zeros(2, dtype=torch.int64)}
    batch = pack([[1], [1]], [[2, 3], [4]], per_sequence=facts)
    old_K, kl_K = torch.full((3,), -1.0), torch.tensor([0.4, -0.1, 0.2])
    batch.add_columns(values=torch.tensor([0.3, 0.5, 0.7]), old_log_probs=old_K, ref_log_probs=old_K - kl_K)
    columns, metrics = advantages(batch, algorithm, max_tokens=20, kl_coef=0.2, lam=algorithm.lam)
    advantages_K, returns_K = columns["advantages"], columns["returns"]
    last = 1 + penalty * 0.1 - 0.5
    first = -penalty * 0.4 + 0.9 * 0.5 - 0.3 + 0.9 * 0.5 * last
    other = -penalty * 0.2 - 0.7
    assert advantages_K.tolist() == pytest.approx([first, last, other], abs=1e-6)
    assert returns_K.tolist() == pytest.approx([first + 0.3, last + 0.5, other + 0.7], abs=1e-6)
    assert metrics["actor/ref_kl"] == pytest.approx((0.4 - 0.1 + 0.2) / 3)


def test_micro_batches_share_the_critics_loss() -> None:
    """Half the squared error, clipped around the old value, as a mean over all tokens of the mini batch."""

    def share(values: list[float], returns: list[float]) -> dict[str, float]:
        columns = {"returns": returns, "values": [0.0] * len(values), "mean_weights": [1 / 3] * len(values)}
        batch = SimpleBatch.pack([([1], list(range(len(values))))], columns)
        output = critic_loss(ValueOutputs(values_K=torch.tensor(values)), batch, value_clip=0.3)
        return {"loss": float(output.loss), "clip_fraction": float(output.metrics["clip_fraction"])}

    assert share([0.1, 0.5], [1.0, 1.0]) == pytest.approx(
        {"loss": (0.5 * 0.9**2 + 0.5 * 0.7**2) / 3, "clip_fraction": 1 / 3}
    )
    assert share([-0.4], [0.0]) == pytest.approx({"loss": 0.5 * 0.4**2 / 3, "clip_fraction": 0.0})


@pytest.mark.long
@pytest.mark.e2e
def test_three_steps_train_adapters_and_critic(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(
        tmp_path,
        *("trainer.total_training_steps=3", "algorithm.critic_warmup_steps=1", "algorithm.kl_coef=0.05"),
        *("algorithm.kl_target=0.01", "critic.zero.stage=3", "actor.lora.rank=4", "actor.lora.base_format=nf4"),
        *("actor.optim.lr=0.02", "rollout.max_lora_rank=8", "task.kind=calculator"),
        *("episode.function=apps.grpo.calculator:with_calculator", "warm_start.steps=20", "task.num_val=32"),
        *("task.num_demonstrations=2000", "batch.train_batch_size=8", "batch.mini_batch_size=4", "sampling.n=2"),
        *("reward.method=flexible", "reward.format_score=0.5", "trainer.save_freq=3"),
        app="ppo",
    )
    run = app.succeeded()
    _, first, second, third = metrics_rows(run)
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
            *("trainer.num_ranks=1", "algorithm.critic_warmup_steps=1", "trainer.total_training_steps=3"),
            *("rollout.deterministic=true", "warm_start.steps=20", "task.num_val=32", "batch.train_batch_size=8"),
            *("batch.mini_batch_size=4", "sampling.n=2", "reward.method=flexible", "reward.format_score=0.5"),
            *overrides,
            app="ppo",
        )
        assert app.finish() == 0, app.output
        assert not app.survivors()
        return list(exact_metrics(max((tmp_path / name).iterdir())).values())

    shared = run("shared")
    own = run("own", "trainer.num_critic_ranks=2", "critic.zero.stage=1", "trainer.save_freq=2")
    for key in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/values/mean", "critic/score/mean"):
        for ours, theirs in zip(own[1:], shared[1:], strict=True):
            assert float(ours.get(key, -1)) == pytest.approx(float(theirs.get(key, -1)), rel=1e-4, abs=1e-6), key
    resumed = run(
        "own", "trainer.num_critic_ranks=2", "critic.zero.stage=1", "trainer.save_freq=2", "trainer.resume=auto"
    )
    assert resumed[-1] == own[-1]
