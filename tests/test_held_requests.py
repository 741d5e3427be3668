"""Pushes while requests are held on the server: every token has its version, and the KV cache is the stated one."""

from collections.abc import Iterator
from typing import Any

import pytest

from plinth_testing import random_model, tiny_config, wait_until, write_word_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
# So many tokens that generation outlasts two pushes on a machine that is busy with other tests.
NUM_TOKENS, NUM_SAMPLES = 1500, 24


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Three policies."""
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.08,
        "max_position_embeddings": 2048,
    }
    return [random_model(tiny_config(**sizes, **ids), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def client(models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The client of one server."""
    from rollout_vllm import RolloutClient, RolloutConfig, ServerGroup
    from weight_sync import server_args, server_env

    folder = tmp_path_factory.mktemp("held")
    models[0].save_pretrained(folder / "model")
    write_word_tokenizer(folder / "model", eos_token="w1", pad_token="w0", unk_token="w2")
    config = RolloutConfig(
        max_model_len=1536, kv_cache_gib=0.1, dtype="float32", cpu_threads=1, startup_timeout_s=400.0
    )
    args, env = server_args(), server_env("cpu")
    with ServerGroup.launch(folder / "model", config, log_dir=folder, extra_args=args, env=env) as servers:
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as client:
            yield client


def log_probs(models: list[Any], prompt: list[int], response: list[int], counts: list[int]) -> list[float]:
    """Log-probs of a response of which `counts` tokens come from each of `models`, on one KV cache.

    A model computes keys and values from the last token of the model before on; earlier ones stay.
    """
    import torch

    cache, fed, sampled, values = None, prompt, 0, list[float]()
    for model, count in zip(models, counts, strict=True):
        tokens = response[sampled : sampled + count]
        with torch.no_grad():
            out = model(torch.tensor([fed + tokens[:-1]]), past_key_values=cache, use_cache=True)
        cache, fed, sampled = out.past_key_values, tokens[-1:], sampled + count
        log_probs_LV = out.logits[0, -count:].log_softmax(-1)
        values += log_probs_LV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return values


def difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("running_requests", "base"), [("keep", 10), ("recompute", 20)])
def test_spans_are_exact_and_the_kv_cache_is_the_stated_one(
    client: Any, models: list[Any], running_requests: Any, base: int
) -> None:
    """Two pushes during generation: one response holds tokens of three policy versions."""
    from rollout_vllm import Request, SamplingConfig
    from weight_sync import ModuleSource, SyncConfig, WeightPusher

    def push(number: int) -> None:
        sync = SyncConfig(running_requests=running_requests)
        with WeightPusher(ModuleSource(models[number]), client.endpoints, sync) as pusher:
            assert pusher.push(base + number).num_attempts == 1
        assert client.run(client.fetch_policy_versions()) == [base + number]

    def num_generated() -> float:
        return float(client.metrics()["generation_tokens"])

    def wait_for(num_tokens: float) -> None:
        wait_until(lambda: num_generated() > num_tokens)

    push(0)
    requests = [Request(prompt_id=f"p{i}", prompt_ids=[3 + i, 9, 20 + i, 33], seed=1000 * i) for i in range(6)]
    sampling = SamplingConfig(n=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    begun = num_generated()
    early = client.start(client.generate(requests[:3], sampling))
    wait_for(begun + NUM_SAMPLES * 10)
    joining = client.start(client.generate(requests[3:], sampling))
    for number in (1, 2):
        wait_for(begun + number * NUM_SAMPLES * 40)
        push(number)
    groups = [*early.result(400), *joining.result(400)]
    samples = [sample for group in groups for sample in group.samples]
    assert [len(sample.response_ids) for sample in samples] == [NUM_TOKENS] * NUM_SAMPLES
    mixed = [sample for sample in samples if len(sample.version_spans) == 3]
    assert mixed, [sample.version_spans for sample in samples]
    assert len({sample.version_spans for sample in mixed}) > 1  # the pushes found them at different lengths

    prompts = {request.prompt_id: list(request.prompt_ids) for request in requests}
    clean_differences = []
    for sample in mixed:
        assert [span.policy_version for span in sample.version_spans] == [base, base + 1, base + 2]
        own, response, prompt = sample.log_probs, sample.response_ids.tolist(), prompts[sample.prompt_id]
        counts = [span.num_tokens for span in sample.version_spans]
        clean = [log_probs([model], prompt, response, [NUM_TOKENS]) for model in models]
        places = [number for number, count in enumerate(counts) for _ in range(count)]
        clean_differences.append(difference(own, [clean[number][i] for i, number in enumerate(places)]))
        if running_requests == "keep":
            assert difference(own, log_probs(models, prompt, response, counts)) < 1e-3
            shifted = [counts[0] + 1, counts[1] - 1, counts[2]]
            assert difference(own, log_probs(models, prompt, response, shifted)) > 1e-2
    assert min(clean_differences) > 0.1 if running_requests == "keep" else max(clean_differences) < 1e-3

    # A new request whose prompt continues a held response finds nothing in the prefix cache that is not of the policy.
    prompt = [*prompts["p0"], *groups[0].samples[0].response_ids[:150].tolist()]
    short = SamplingConfig(n=1, max_tokens=40, ignore_eos=True)
    [late] = client.generate_blocking([Request(prompt_id="late", prompt_ids=prompt, seed=5)], short)
    [sample] = late.samples
    assert difference(sample.log_probs, log_probs(models[2:], prompt, sample.response_ids.tolist(), [40])) < 1e-3
    assert sample.version_spans == ((base + 2, 40),)
