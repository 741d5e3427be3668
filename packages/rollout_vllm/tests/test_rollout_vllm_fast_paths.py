"""`RolloutConfig.fast_paths`: a server with them and stock vLLM give the same ids, log-probs and scores."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_vllm_helpers import config_for_tests, make_requests, reference_log_probs

from rollout_vllm import (
    RolloutClient,
    Sample,
    SamplingConfig,
    ScoringError,
    ServerGroup,
    TokenScorer,
    TokenScores,
    UnlabeledTokensError,
)
from rollout_vllm.servers.fast.buffering import INTERVAL

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def stock(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    config = config_for_tests(fast_paths=False)
    with ServerGroup.launch(model_folder, config, log_dir=tmp_path_factory.mktemp("stock")) as group:
        group.wait_ready()
        yield group


def one_by_one(servers: ServerGroup, sampling: SamplingConfig) -> list[Sample]:
    """The samples of a server that has one request at a time: on the CPU, results depend on the batch composition."""
    samples: list[Sample] = []
    with RolloutClient(servers.endpoints[:1], config_for_tests()) as client:
        for request in make_requests(4):
            (group,) = client.generate_blocking([request], sampling)
            samples += group.samples
    return samples


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(n=1, max_tokens=3 * INTERVAL + 5, temperature=0.9, ignore_eos=True),
        SamplingConfig(n=1, max_tokens=40, temperature=1.0, top_p=0.8, top_k=20),
        SamplingConfig(n=1, max_tokens=20, temperature=0.0, stop_token_ids=(5, 6, 7, 8, 9, 10, 11, 12)),
        SamplingConfig(n=1, max_tokens=3 * INTERVAL, stop=("w2", "w31 w"), ignore_eos=True),
    ],
    ids=["long", "top_p", "greedy", "stop strings"],
)
def test_tokens_and_log_probs_equal_those_of_stock_vllm(
    pair: ServerGroup, stock: ServerGroup, sampling: SamplingConfig
) -> None:
    fast, plain = one_by_one(pair, sampling), one_by_one(stock, sampling)
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.log_probs is not None
        assert theirs.log_probs is not None
        assert ours.log_probs.tolist() == theirs.log_probs.tolist()
        assert ours.finish_reason == theirs.finish_reason


def test_scores_of_given_tokens_equal_those_of_stock_vllm(pair: ServerGroup, stock: ServerGroup) -> None:
    """Of one sequence: a server with LoRA adapters dies of several on the CPU."""
    [fast], [plain] = (scores_of(servers, [([3, 4, 5], [6, 7, 8, 9])], top_k=3) for servers in (pair, stock))
    for name in ("log_probs", "top_ids", "top_log_probs"):
        assert getattr(fast, name).tolist() == getattr(plain, name).tolist()


def test_scores_of_given_tokens_are_those_of_transformers(stock: ServerGroup, model_folder: Path) -> None:
    prompts = [list(request.prompt_ids) for request in make_requests(4, length=9, step=5)]
    cases = [(ids[:3], ids[3 : 4 + index]) for index, ids in enumerate(prompts)]
    expected = reference_log_probs(cases, temperature=1.0, model=model_folder)
    for top_k in (5, 0):
        for scores, [of_model] in zip(scores_of(stock, cases, top_k=top_k), expected, strict=True):
            assert scores.log_probs == pytest.approx(of_model, abs=2e-5)
            assert scores.top_ids.shape == scores.top_log_probs.shape == (len(of_model), top_k)
            assert (scores.top_log_probs[:, :-1] >= scores.top_log_probs[:, 1:]).all()
    with pytest.raises(ScoringError):
        scores_of(stock, [([3, 4], [5, 6])], top_k=60)  # more than --max-logprobs


def scores_of(servers: ServerGroup, cases: list[tuple[list[int], list[int]]], *, top_k: int) -> list[TokenScores]:
    with TokenScorer(servers.endpoints[:1], config_for_tests()) as scorer:
        return scorer.run(scorer.score(cases, top_k=top_k))


def test_stock_server_replaces_nothing_for_speed_and_does_not_label_tokens(stock: ServerGroup) -> None:
    log = stock.servers[0].log_path.read_text()
    assert "fast paths: turned off by fast_paths=False" in log
    in_use = set(re.findall(r"^(.*): \w+ is replaced and in use$", log, re.MULTILINE))
    others = {"store of the worker in a file", "images of completion requests"}  # for safety, and what vLLM cannot do
    assert in_use <= others
    with RolloutClient(stock.endpoints, config_for_tests()) as client, pytest.raises(UnlabeledTokensError):
        client.run(client.fetch_policy_versions())
