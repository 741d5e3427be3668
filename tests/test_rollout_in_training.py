"""Tools, rewards, existing servers and server failures in training, on the real stack."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "rl_runtime" / "tests"))

from rl_runtime_reward_service import quality, reward_service

from rollout_vllm.episodes.remote_rewards import judge_prompt
from tests import planted_secrets
from tests.run_folders import column, metrics_rows, rollouts

REPO = Path(__file__).resolve().parents[1]
SMALL = (
    *("warm_start.steps=20", "task.num_val=32", "task.num_demonstrations=2000", "batch.train_batch_size=8"),
    *("batch.mini_batch_size=4", "sampling.n=4", "trainer.val_before_train=false", "actor.optim.lr=1e-3"),
)

pytestmark = pytest.mark.e2e


REQUIRED_COLUMNS = {
    "step",
    "critic/score/mean",
    "perf/throughput",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/sync",
    "timing_s/update_actor",
    "actor/grad_norm",
    "actor/loss",
    "actor/skipped_inactive_micro",
    "rollout/log_prob_mismatch",
    "response_length/mean",
    "memory/host_gib",
}


def test_tools_and_a_users_reward_survive_a_killed_server_and_the_run_folder_is_whole(
    tmp_path: Path, start_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO / "packages" / "rl_runtime" / "tests"), prepend=os.pathsep)
    for name, value in planted_secrets.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    app = start_app(
        tmp_path,
        "preset=calculator",
        "rollout.api_key=${oc.env:PLANTED_API_KEY}",
        "trainer.num_ranks=1",
        "trainer.total_training_steps=3",
        *SMALL,
        "trainer.val_before_train=true",
        "sampling.temperature=1.25",  # trainer and servers have to divide the logits alike
        "reward.function=rl_runtime_user_functions:length_reward",
        *("tracking.curves=true", "tracking.report=true"),
    )
    app.wait_for("s/step")
    (server,) = [p for p in app.children("_serve.py") if "_supervise.py" not in " ".join(p.cmdline())]
    server.kill()
    app.wait_for("rollout server 0 restarted")
    app.wait_for("s/step")
    run = app.succeeded()
    assert planted_secrets.leaks(app.output, run) == []
    assert (run / "servers" / "server_0.log").read_text().count("started ahead: ") == 1  # not the restarted one
    for name in ("config.yaml", "train.log", "curves.png", "report.html"):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").iterdir())
    assert (run / "model" / "config.json").exists()
    assert "held-out accuracy" in app.output
    assert str(run) in app.output
    before, *rows = metrics_rows(run)
    assert float(before["val/num_samples"]) == 32
    assert [before["step"], *(row["step"] for row in rows)] == [str(step) for step in range(4)]
    assert set(rows[0]) >= REQUIRED_COLUMNS
    assert float(rows[-1]["rollout/num_restarts"]) == 1
    for row in rows:
        assert float(row["rollout/num_samples"]) == 32, "a sample was lost"
        assert float(row["rollout/num_failed"]) == 0
        # Two fp32 implementations of the same weights. Context is not counted, and the trainer reads it as the server
        # did. A server with the weights of its model folder, or of another version, would differ by tenths.
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
        assert float(row["actor/skipped_inactive_micro"]) == 0
        parts = sum(float(v) for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step" and v)
        assert parts == pytest.approx(float(row["timing_s/step"]), rel=0.15)
    assert max(column(run, "rollout/num_turns")) > 1
    assert min(float(row["actor/grad_norm"]) for row in rows) > 0
    samples = rollouts(run)
    assert [sample for sample in samples if sample["num_context_tokens"]]
    for sample in samples:
        assert {"prompt", "response"} <= set(sample)
        assert sample["reward"] == len(sample["response"].split())
        assert sample["policy_version"] == sample["step"] - 1
        assert sample["version_spans"] == [[sample["step"] - 1, sample["num_response_tokens"]]]


def read_metrics(run: Path) -> list[dict[str, str]]:
    return [row for row in metrics_rows(run) if row.get("actor/grad_norm")]


JUDGE = "Is {response} what {prompt} asks for? It should be {ground_truth}."


@pytest.mark.thorough
def test_existing_servers_and_an_existing_judge(
    tmp_path: Path, start_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's server gets the weights even if an earlier run left it paused, and keeps the last policy."""
    from plinth_base.endpoint import call
    from rl_data import build_tiny_model
    from rollout_vllm import RolloutConfig, ServerGroup
    from weight_sync import server_args, server_env

    config = RolloutConfig(max_model_len=68, kv_cache_gib=0.1, dtype="float32", cpu_threads=1, api_key="the key")
    with (
        reward_service() as judge,
        ServerGroup.launch(
            build_tiny_model(tmp_path / "theirs"),
            config,
            log_dir=tmp_path,
            extra_args=server_args(),
            env=server_env("cpu"),
        ) as group,
    ):
        group.wait_ready()
        [endpoint] = group.endpoints
        assert call(endpoint, "POST", "/sleep?level=0&mode=wait")[0] == 200
        key_file = tmp_path / "key"
        key_file.write_text("the key\n")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        app = start_app(
            tmp_path / "outputs",
            *SMALL,
            f"rollout.urls={endpoint.url}",
            f"rollout.api_key_file={key_file}",
            f"reward.url={judge.url}",
            "reward.service=judge",
            f"reward.judge_prompt={JUDGE}",
            "reward.api_key=${oc.env:JUDGE_KEY}",
            "trainer.total_training_steps=2",
        )
        assert app.finish() == 0, app.output
        assert not app.survivors()
        group.check()
        assert json.loads(call(endpoint, "GET", "/weight_info")[1]) == {"weight_version": "2"}
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 0}
        status, text = call(endpoint, "POST", "/v1/completions", body | {"return_token_ids": True})
        assert status == 200, text

    (run,) = (tmp_path / "outputs").iterdir()
    [choice] = json.loads(text)["choices"]
    served = choice["logprobs"]["token_logprobs"]
    exported, before = (log_probs(run / name, [5, 6, 7], choice["token_ids"]) for name in ("model", "warm_start_model"))
    assert max(abs(a - b) for a, b in zip(served, exported, strict=True)) < 1e-4
    assert max(abs(a - b) for a, b in zip(served, before, strict=True)) > 1e-3, "two steps changed nothing"
    for row in read_metrics(run):
        assert float(row["rollout/num_samples"]) == 32
        assert float(row["rollout/num_failed"]) == 0
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
        assert float(row["actor/grad_norm"]) > 0
    assert len(read_metrics(run)) == 2
    samples = rollouts(run)
    assert samples
    for sample in samples:
        fields = {name: sample[name] for name in ("prompt", "response", "ground_truth")}
        asked, _ = judge_prompt(JUDGE, fields, trusted=("prompt", "ground_truth"))
        assert sample["reward"] == pytest.approx(quality(asked))
    assert "the key" not in (run / "config.yaml").read_text()
    assert "every user of this host" not in app.output
    assert (run.stat().st_mode & 0o777) == 0o700


def log_probs(folder: Path, prompt: list[int], response: list[int]) -> list[float]:
    """Log-probs of the response's tokens under the model of a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits_LV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    values: list[float] = logits_LV.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
    return values
