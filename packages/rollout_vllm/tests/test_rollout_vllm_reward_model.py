"""A classifier behind a real vLLM server: its probabilities and logits compared with transformers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from rollout_vllm_helpers import config_for_tests, run_script

from rollout_vllm import RemoteReward, RewardOutcome, ServerGroup, classification_reward, pooling_reward

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

BUILD = """
import json, sys, torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification
torch.manual_seed(3)
config = Qwen3Config.from_pretrained(sys.argv[1], num_labels=2)
model = Qwen3ForSequenceClassification(config).eval()
torch.nn.init.normal_(model.score.weight, std=0.5)
model.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
with torch.no_grad():
    print(json.dumps([model(torch.tensor([ids])).logits[0].tolist() for ids in json.loads(sys.argv[3])]))
"""
PROMPTS = [[5, 6, 7, 8], [11, 3, 42, 9, 17, 23], [60, 61, 62]]


def first_score(reward: RemoteReward, item: list[int], group: ServerGroup) -> RewardOutcome:
    deadline = time.monotonic() + 400
    while (outcome := reward.submit(item).result(400)).kind == "connection":
        group.check()
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return outcome


def test_probabilities_and_logits(model_folder: Path, tmp_path: Path) -> None:
    logits = json.loads(run_script(BUILD, model_folder, tmp_path / "reward", json.dumps(PROMPTS)).splitlines()[-1])
    config = config_for_tests()
    with ServerGroup.launch(tmp_path / "reward", config, log_dir=tmp_path, extra_args=["--runner", "pooling"]) as group:
        [endpoint] = group.endpoints
        with classification_reward(endpoint, label=1, use_activation=False, timeout_s=300) as reward:
            assert first_score(reward, PROMPTS[0], group).kind == "ok"
            futures = [reward.submit(ids) for ids in PROMPTS]
            scores = [future.result(300).score for future in futures]
        assert scores == pytest.approx([row[1] for row in logits], abs=1e-3)
        with classification_reward(endpoint, label=0, use_activation=True, timeout_s=300) as reward:
            assert 0 < (reward.submit(PROMPTS[0]).result(300).score or 0) < 1
        with pooling_reward(endpoint, timeout_s=300) as reward:
            assert reward.submit(PROMPTS[1]).result(300).kind == "ok"
        with classification_reward(endpoint, label=9) as reward:
            assert reward.submit(PROMPTS[0]).result(300).kind == "exception"
