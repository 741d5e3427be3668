"""A mixture of experts is trained with the routes of its servers: rollout, batch, log-probs, update, push, resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plinth_testing import random_model, tiny_config, write_word_tokenizer
from tests.run_folders import metrics_rows, only

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: the first of its three layers has no experts."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_config("qwen3_moe", **sizes, mlp_only_layers=[0], max_position_embeddings=128, pad_token_id=0)
    folder = tmp_path_factory.mktemp("mixture")
    random_model(config).save_pretrained(folder)
    write_word_tokenizer(folder, 64, eos_token="w2", bos_token="w1", pad_token="w0")
    return folder


def settings(mixture: Path, folder: Path) -> list[str]:
    data = folder / "train.jsonl"
    data.write_text("\n".join(json.dumps({"question": f"w{i} w{i + 1} w{i + 2}"}) for i in range(3, 40)))
    return [
        f"model.path={mixture}",
        f"data.train=[{data}]",
        "reward.function=benchmarks.grpo_step.workload:parity",
        "trainer.num_ranks=2",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "data.max_prompt_length=16",
        "rollout.max_model_len=48",
        "rollout.kv_cache_gib=0.1",
        "batch.train_batch_size=4",
        "batch.mini_batch_size=4",
        "sampling.n=4",
        "sampling.max_tokens=24",
        "actor.optim.lr=1e-3",
        "algorithm.kl_coef=0.01",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
    ]


def run(start_app: Callable[..., Any], folder: Path, *overrides: str) -> list[dict[str, str]]:
    app = start_app(folder, *overrides)
    assert app.finish() == 0, app.output
    return metrics_rows(only(path for path in folder.glob("grpo_*")))


def test_a_mixture_learns_with_the_routes_of_its_servers_and_partial_rollouts(
    mixture: Path, tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    rows = run(
        start_app,
        tmp_path,
        *settings(mixture, tmp_path),
        "actor.router_replay=R3",
        "actor.zero.stage=3",
        "actor.gradient_checkpointing=true",
        "actor.collective_guard=auto",
        "sync.verify=true",
        "oversampling.extra_prompts=2",
        "trainer.total_training_steps=3",
    )
    assert len(rows) == 3
    assert float(rows[0]["actor/routes_differ"]) < 0.01, "later steps have samples of older policy versions"
    assert all(float(row["rollout/log_prob_mismatch"]) < 1e-4 for row in rows), "fresh weights, the same routes"


@pytest.mark.thorough
def test_groups_drawn_ahead_bring_their_routes_into_a_resumed_run(
    mixture: Path, tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    common = [
        *settings(mixture, tmp_path),
        f"data.val=[{tmp_path / 'train.jsonl'}]",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "trainer.max_staleness=1",
        "rollout.max_samples_in_flight=4",  # so that groups are in flight at every push
        "actor.router_replay=R3",
        "trainer.total_training_steps=4",
    ]
    first = start_app(tmp_path / "first", *common)
    first.wait_for("step 2/4")
    first.stop()
    old = only((tmp_path / "first").glob("grpo_*"))
    rows = run(start_app, tmp_path / "second", *common, "trainer.resume=auto", f"trainer.resume_from={old}")
    assert rows[-1]["step"] == "4"
    assert all(float(row["actor/routes_differ"]) < 0.5 for row in rows)
    assert any(row["rollout/log_prob_mismatch_stale"] for row in rows)
    assert all(row["val/accuracy"] for row in rows)
