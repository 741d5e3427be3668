"""`RolloutConfig.fast_paths`: a server with them and stock vLLM give the same ids, log-probs and scores."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_vllm_helpers import config_for_tests, make_requests

from rollout_vllm import RolloutClient, Sample, SamplingConfig, ServerGroup, TokenScorer, UnlabeledTokensError
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
    ],
    ids=["long", "top_p", "greedy"],
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
    scores = []
    for servers in (pair, stock):
        with TokenScorer(servers.endpoints[:1], config_for_tests()) as scorer:
            (scored,) = scorer.run(scorer.score([([3, 4, 5], [6, 7, 8, 9])], top_k=3))
            scores.append((scored.log_probs.tolist(), scored.top_ids.tolist(), scored.top_log_probs.tolist()))
    assert scores[0] == scores[1]


def test_stock_server_replaces_nothing_for_speed_and_does_not_label_tokens(stock: ServerGroup) -> None:
    log = stock.servers[0].log_path.read_text()
    assert "fast paths: turned off by fast_paths=False" in log
    in_use = set(re.findall(r"^(.*): \w+ is replaced and in use$", log, re.MULTILINE))
    assert in_use <= {"store of the worker in a file"}, "that one is for safety, not for speed"
    with RolloutClient(stock.endpoints, config_for_tests()) as client, pytest.raises(UnlabeledTokensError):
        client.run(client.fetch_policy_versions())
