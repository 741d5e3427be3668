"""Sampling: which weights the servers hold, and the requests that run under them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from apps.serve.models import BASE, Models, Weights
from apps.serve.wire import LENGTH, STOP, write_samples
from rl_runtime import InputError, RlRuntimeError
from rl_runtime.rules import check_value
from rollout_vllm import Request, SamplingConfig
from rollout_vllm.client.scoring import TokenScorer

MAX_SAMPLES = 1024
"""Most samples of one request."""
UNSUPPORTED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "topk_sample_logprobs")


class ServedWeights:
    """The weights that the servers hold. Requests for others wait until those that run have ended, in their order.

    All methods are of one event loop.
    """

    def __init__(self, models: Models) -> None:
        self._models, self.held = models, models.base
        self._in_turn, self._idle = asyncio.Lock(), asyncio.Event()
        self._num_running = 0
        self._idle.set()

    @asynccontextmanager
    async def using(self, weights: Weights) -> AsyncIterator[str | None]:
        """A context in which the servers hold `weights`, as the model of this name; None: the only one.

        Raises InputError for weights that nobody has any more.
        """
        async with self._in_turn:
            if weights.key != self.held.key:
                await self._idle.wait()
                await asyncio.to_thread(self._models.give, weights)
                self.held = weights
            self._num_running += 1
            self._idle.clear()
        try:
            yield None
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def hold(self, weights: Weights) -> None:
        """Gives the servers `weights`, when the requests that run have ended."""
        async with self.using(weights):
            pass


class ServedAdapters:
    """The base model and adapters on the servers, where each has a name of its own and never changes. Requests for all
    of them run together."""

    def __init__(self, models: Models) -> None:
        self._models, self._names, self._loading = models, set[str](), asyncio.Lock()

    @asynccontextmanager
    async def using(self, weights: Weights) -> AsyncIterator[str | None]:
        """As `ServedWeights.using`."""
        await self.hold(weights)
        yield None if weights.key == BASE else weights.key

    async def hold(self, weights: Weights) -> None:
        """Lets the servers read `weights` once. Raises InputError if their folder is gone."""
        if weights.folder is None or not weights.folder.exists():
            raise weights.gone()
        async with self._loading:
            if weights.key != BASE and weights.key not in self._names:
                await asyncio.to_thread(self._models.load_adapter, weights)
                self._names.add(weights.key)


@dataclass(frozen=True, kw_only=True)
class SamplingSession:
    """Weights that a sampling client asks for."""

    weights: Callable[[], Weights]
    """Those of a moment: fixed ones, or the newest that its training client has published."""
    model_path: str | None = None


class Sampler:
    """Answers sampling requests from the rollout servers."""

    def __init__(self, models: Models, served: ServedWeights | ServedAdapters) -> None:
        self._models, self._served = models, served
        self._client = models.session.client
        self._scorer = TokenScorer(models.session.servers.endpoints, models.config.rollout)

    async def close(self) -> None:
        """Closes the connections of this event loop."""
        await self._client.aclose()
        await self._scorer.aclose()

    async def sample(self, session: SamplingSession, body: Mapping[str, Any], request_id: str) -> bytes:
        """Samples of one prompt with their log-probs, and those of the prompt itself if they are asked for.

        Log-probs are those of the distribution that was sampled from, after temperature, top_k and top_p; of the
        prompt, at temperature 1.
        """
        if given := [name for name in UNSUPPORTED if body.get(name)]:
            raise InputError("this server does not compute it", field=given[0], allowed="not set")
        prompt = prompt_ids(body)
        num_samples, limit = int(body.get("num_samples", 1)), self._models.max_tokens
        check_value(dict(body), "num_samples", 1 <= num_samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        if not 1 <= len(prompt) < limit:
            raise InputError(field="prompt", value=len(prompt), allowed=f"1 to {limit - 1} tokens")
        settings, seed = sampling_settings(body.get("sampling_params") or {}, num_samples, room=limit - len(prompt))
        async with self._served.using(session.weights()) as name:
            request = Request(prompt_id=request_id, prompt_ids=prompt, seed=seed, model=name)
            scores = self._score(prompt, body, name)
            group, (log_probs, top) = await asyncio.gather(self._client.sample(request, settings), scores)
        if group.failures:
            failure = group.failures[0]
            kind = InputError if failure.kind in ("too_long", "refused") else RlRuntimeError
            raise kind(failure.message, field="prompt" if kind is InputError else None)
        samples = sorted(group.samples, key=lambda sample: sample.sample_index)
        rows = [
            (one.response_ids, one.log_probs, LENGTH if one.finish_reason == "length" else STOP)
            for one in samples
            if one.log_probs is not None
        ]
        return write_samples(rows * (num_samples // len(rows)), log_probs, top)

    async def _score(self, prompt: list[int], body: Mapping[str, Any], name: str | None) -> tuple[Any, Any]:
        """Log-probs of the prompt, NaN for its first token, and its likeliest tokens; None each if not asked for."""
        top_k, last = int(body.get("topk_prompt_logprobs", 0)), body.get("prompt_logprobs_last_n")
        check_value(dict(body), "topk_prompt_logprobs", 0 <= top_k <= 20, "0 to 20") if top_k else None
        if not (body.get("prompt_logprobs") or top_k):
            return None, None
        if self._models.serves_adapters and not self._models.session.placement.on_gpu:
            problem = "vLLM on a CPU does not survive it with rollout.max_lora_rank"
            raise InputError(problem, field="prompt_logprobs", allowed="not set")
        num = len(prompt) - 1 if last is None else min(int(last), len(prompt) - 1)
        log_probs = np.full(len(prompt), np.nan, np.float32)
        ids, values = np.zeros((len(prompt), top_k), np.int32), np.full((len(prompt), top_k), -99999.0, np.float32)
        if num > 0:
            [scores] = await self._scorer.score([(prompt[:-num], prompt[-num:])], top_k=top_k, model=name)
            log_probs[-num:], ids[-num:], values[-num:] = scores.log_probs, scores.top_ids, scores.top_log_probs
        return (log_probs if body.get("prompt_logprobs") else None), ((ids, values) if top_k else None)


def prompt_ids(body: Mapping[str, Any]) -> list[int]:
    """The tokens of the prompt. Raises InputError for chunks that are no text."""
    chunks = (body.get("prompt") or {}).get("chunks", [])
    if any("tokens" not in chunk for chunk in chunks):
        raise InputError("images and audio", field="prompt", allowed="chunks of text")
    return [int(token) for chunk in chunks for token in chunk["tokens"]]


def sampling_settings(params: Mapping[str, Any], num_samples: int, *, room: int) -> tuple[SamplingConfig, int | None]:
    """The servers' settings for the SDK's, and the seed.

    `stop`: null ends a response at an end-of-sequence token, [] at none; texts or tokens end it besides. Greedy samples
    are all equal, so that one is enough.
    """
    stop = params.get("stop")
    stops: list[Any] = [stop] if isinstance(stop, str) else list(stop or ())
    is_text = all(isinstance(one, str) for one in stops)
    if not is_text and not all(isinstance(one, int) for one in stops):
        raise InputError(field="sampling_params.stop", value=stop, allowed="texts or tokens")
    tokens = room if params.get("max_tokens") is None else min(int(params["max_tokens"]), room)
    temperature = float(params.get("temperature", 1.0))
    settings = SamplingConfig(
        n=num_samples if temperature > 0 else 1,
        max_tokens=tokens,
        temperature=temperature,
        top_k=int(params.get("top_k", -1)),
        top_p=float(params.get("top_p", 1.0)),
        stop=tuple(stops) if is_text else (),
        stop_token_ids=() if is_text else tuple(stops),
        ignore_eos=stop == [],
    )
    seed = params.get("seed")
    return settings, None if seed is None else int(seed) % 2**62
