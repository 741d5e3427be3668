"""Generation across weight updates: requests are paused, the server gets new weights, and responses are resumed."""

from pathlib import Path
from typing import Any

import pytest

from plinth_testing import random_model, tiny_config, write_word_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def tiny_model(seed: int) -> Any:
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.08}
    return random_model(tiny_config(**sizes, **ids), seed=seed)


def log_probs(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        logits_LV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    values: list[float] = logits_LV.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
    return values


def test_every_token_has_the_version_and_log_prob_it_was_drawn_with(tmp_path: Path) -> None:
    """Two pushes during generation: one response holds tokens of three policy versions."""
    import time

    from rollout_vllm import Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup, token_versions
    from weight_sync import ModuleSource, SyncConfig, WeightPusher, server_args, server_env

    models = [tiny_model(seed) for seed in range(3)]
    models[0].save_pretrained(tmp_path / "model")
    write_word_tokenizer(tmp_path / "model", eos_token="w1", pad_token="w0", unk_token="w2")
    config = RolloutConfig(max_model_len=512, kv_cache_gib=0.1, dtype="float32", cpu_threads=1, startup_timeout_s=400.0)
    sync = SyncConfig()
    sampling = SamplingConfig(n=4, max_tokens=400, ignore_eos=True)
    requests = [Request(prompt_id=f"p{i}", prompt_ids=[3 + i, 9, 20 + i, 33], seed=1000 * i) for i in range(8)]
    with ServerGroup.launch(
        tmp_path / "model", config, log_dir=tmp_path, extra_args=server_args(sync, "cpu"), env=server_env(sync, "cpu")
    ) as servers:
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as client:
            future = client.start(client.generate(requests, sampling))
            for version in (1, 2):
                begun = client.metrics()["generation_tokens"]
                deadline = time.monotonic() + 300
                while client.metrics()["generation_tokens"] < begun + 8 * 4 * 60:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                client.run(client.pause(timeout_s=300))
                with WeightPusher(ModuleSource(models[version]), servers.endpoints, sync) as pusher:
                    pusher.push(version)
                client.resume(version)
            groups = future.result(400)

    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 32
    assert all(len(sample.response_ids) == 400 for sample in samples)
    spans = [[span.policy_version for span in sample.version_spans] for sample in samples]
    assert all(span == sorted(set(span)) for span in spans), spans
    assert [0, 1, 2] in spans, spans  # all of them on an idle machine
    for group, request in zip(groups, requests, strict=True):
        sample = max(group.samples, key=lambda sample: len(sample.version_spans))
        by_version = [log_probs(model, list(request.prompt_ids), sample.response_ids) for model in models]
        versions = token_versions(sample.version_spans)
        right = [
            abs(value - by_version[v][i]) for i, (value, v) in enumerate(zip(sample.log_probs, versions, strict=True))
        ]
        wrong = [
            abs(value - by_version[(v + 1) % 3][i])
            for i, (value, v) in enumerate(zip(sample.log_probs, versions, strict=True))
        ]
        assert max(right) < 1e-3
        assert sum(wrong) / len(wrong) > 0.5
