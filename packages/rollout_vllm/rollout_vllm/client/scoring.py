"""Log-probs of given tokens from a server: a teacher scores what another model sampled.

    with TokenScorer([Endpoint("http://10.0.0.7:8000", key)]) as scorer:
        [scores] = scorer.run(scorer.score([(prompt_ids, response_ids)], top_k=8))

vLLM computes them in its prefill (`prompt_logprobs` of /v1/completions), from the logits at temperature 1. It does not
read the prefix cache for such a request. A server of vLLM 0.32 with LoRA enabled dies of it on the CPU.

Shapes: R response tokens, k of the teacher's most likely tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from plinth_base import Endpoint

from ..config import RolloutConfig
from ..errors import ScoringError
from ..samples import id_list
from .balanced import BalancedClient
from .protocol import MalformedAnswerError
from .request_runner import RequestFailure
from .transport import gather_or_cancel


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """A model's log-probs (natural logarithm) of one response, at temperature 1."""

    log_probs: npt.NDArray[np.float32]
    """[R], of the response's own tokens."""
    top_ids: npt.NDArray[np.int64]
    """[R, k], the most likely tokens in the place of each, the most likely first."""
    top_log_probs: npt.NDArray[np.float32]
    """[R, k], theirs."""


class TokenScorer(BalancedClient):
    """Scores sequences on servers, in parallel; `config` has retries, timeouts and the number of requests in flight.

    A `ServerWatch` restarts servers that die.

    Thread-safe. In blocking code use `run` and `start` with the coroutine that `score` returns.
    """

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig | None = None) -> None:
        super().__init__(endpoints, config or RolloutConfig(), thread_name="token-scorer")

    async def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, top_k: int = 0, model: str | None = None
    ) -> list[TokenScores]:
        """Score the response of each (prompt ids, response ids), in order.

        Args:
            sequences: prompts have at least one token; the servers' context holds one more token than each sequence.
            top_k: number of most likely tokens to return in each place; a server allows 20 unless it was started with
                --max-logprobs.
            model: name of the model that scores; None: that of the servers.

        Raises:
            ScoringError: a server refused a sequence, none answered after all retries, or all were given up.
        """
        return await gather_or_cancel(self._score(prompt, response, top_k, model) for prompt, response in sequences)

    async def _score(
        self, prompt: Sequence[int], response: Sequence[int], top_k: int, model: str | None
    ) -> TokenScores:
        body = partial(scoring_body, [*id_list(prompt), *id_list(response)], top_k)
        read = partial(parse_scores, response=response, top_k=top_k)
        once = partial(self._runner.attempt, body=body, read=read, model=model)
        outcome, server, _ = await self._runner.until_done(once, "", 1)
        if server is None:
            raise ScoringError("no server is left")
        if isinstance(outcome, RequestFailure):
            num_tokens = len(prompt) + len(response)
            raise ScoringError(f"{self._urls[server]} did not score {num_tokens} tokens: {outcome.message}")
        return outcome


def scoring_body(token_ids: Sequence[int], top_k: int, model: str) -> dict[str, Any]:
    """The JSON of a request. vLLM generates at least one token, which nobody reads."""
    return {
        "model": model,
        "prompt": id_list(token_ids),
        "prompt_logprobs": top_k,
        "max_tokens": 1,
        "temperature": 0.0,
        "stream": False,
    }


def parse_scores(answer: Any, response: Sequence[int], top_k: int) -> TokenScores:
    """The scores of the last tokens of the prompt that was sent, which are `response`.

    Raises MalformedAnswerError unless each has a finite log-prob and, with `top_k`, that many ranked tokens.
    """
    try:
        places = answer["choices"][0]["prompt_logprobs"][-len(response) :] if response else []
        log_probs = [place[str(token)]["logprob"] for place, token in zip(places, response, strict=True)]
        ranked = [_ranked(place, top_k) for place in places]
    except (LookupError, TypeError, ValueError) as error:
        raise MalformedAnswerError(f"no log-probs of the given tokens ({type(error).__name__}: {error})") from None
    if not all(map(math.isfinite, log_probs)):
        raise MalformedAnswerError("a log-prob is not finite")
    shape = (len(response), top_k)
    return TokenScores(
        log_probs=np.asarray(log_probs, np.float32),
        top_ids=np.asarray([[token for token, _ in row] for row in ranked], np.int64).reshape(shape),
        top_log_probs=np.asarray([[value for _, value in row] for row in ranked], np.float32).reshape(shape),
    )


def _ranked(place: Mapping[str, Mapping[str, Any]], top_k: int) -> list[tuple[int, float]]:
    """(token, log-prob) of the `top_k` most likely tokens; vLLM adds the given token, whatever its rank."""
    best = sorted(place.items(), key=lambda item: -item[1]["logprob"])[:top_k]
    if len(best) < top_k:
        raise ValueError(f"{len(best)} tokens for top_k={top_k}")
    return [(int(token), float(value["logprob"])) for token, value in best]
