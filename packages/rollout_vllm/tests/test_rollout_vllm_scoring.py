"""Log-probs of given tokens: malformed answers and failures. Real servers are in the tests of the fast paths."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from rollout_vllm_helpers import AppThread

from rollout_vllm import Endpoint, RolloutConfig, ScoringError, TokenScorer
from rollout_vllm.client.protocol import MalformedAnswerError
from rollout_vllm.client.scoring import parse_scores


def place(*log_probs: float) -> dict[str, Any]:
    return {str(token): {"logprob": value} for token, value in enumerate(log_probs)}


def test_scores_are_of_the_last_tokens_and_ranked() -> None:
    answer = {"choices": [{"prompt_logprobs": [None, place(-1, -2, -0.5), place(-3, -0.25, -4)]}]}
    scores = parse_scores(answer, [0, 2], 2)
    assert scores.log_probs.tolist() == [-1, -4]
    assert scores.top_ids.tolist() == [[2, 0], [1, 0]]
    assert scores.top_log_probs.tolist() == [[-0.5, -1], [-0.25, -3]]
    assert parse_scores(answer, [], 2).top_ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("places", "response", "top_k"),
    [
        ([None], [0], 0),
        ([place(-1.0)], [7], 0),
        ([place(-1.0)], [0, 0], 0),
        ([place(float("nan"))], [0], 0),
        ([place(-1.0, -2.0)], [0], 3),
        (None, [0], 0),
    ],
)
def test_an_answer_without_the_tokens_is_malformed(places: Any, response: list[int], top_k: int) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_scores({"choices": [{"prompt_logprobs": places}]}, response, top_k)


class Answers(AppThread):
    """A server that answers a prompt whose first token is a status with it, once; all else with log-probs of -1."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        super().__init__(web.get("/v1/models", self._models), web.post("/v1/completions", self._complete))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "teacher"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        status = body["prompt"][0] if body["prompt"][0] not in self.statuses else 200
        self.statuses.append(status)
        if status >= 300:
            return web.json_response({"error": {"message": "not now"}}, status=status)
        places = [{str(token): {"logprob": -1.0}} for token in body["prompt"]]
        choices = [{"prompt_logprobs": places if body["model"] == "teacher" and status == 200 else None}]
        return web.json_response({"choices": choices})


def test_transient_failures_are_retried_and_refusals_are_not() -> None:
    server = Answers()
    suspects: list[int] = []
    config = RolloutConfig(max_retries=2)
    with TokenScorer([Endpoint(server.url)], config) as scorer:
        for status in (200, 503, 429, 201):  # 201: an answer without log-probs
            (scores,) = scorer.run(scorer.score([([status], [7, 8])]))
            assert scores.log_probs.tolist() == [-1, -1]
        assert server.statuses == [200, 503, 200, 429, 200, 201, 200]
        with pytest.raises(ScoringError):
            scorer.run(scorer.score([([400], [7])]))
        assert server.statuses[-1] == 400, "not retried"
        scorer.report_suspects_to(suspects.append)
        server.close()
        with pytest.raises(ScoringError):
            scorer.run(scorer.score([([200], [7])]))
    assert suspects == [0, 0], "one for each retry"
