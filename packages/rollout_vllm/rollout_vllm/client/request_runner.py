"""Sends one request until it succeeds or fails for good: attempts, retries, and interruption of running requests."""

import asyncio
import itertools
import json
import random
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import aiohttp

from plinth_base.endpoint import error_message

from ..config import RolloutConfig, SamplingConfig
from ..errors import ControlError
from ..samples import Request
from .dispatch import Dispatcher
from .metrics import ClientCounters
from .protocol import Choice, MalformedAnswerError, completion_body, parse_completion
from .retry import ABORTED, CONNECTION_LOST, MALFORMED, TIMED_OUT, RetryDecision, backoff_s, classify_status
from .transport import Transport

T = TypeVar("T")

_ABORT_TIMEOUT_S = 30.0


class Owner(Protocol):
    """The group that sends a request. stopping: it wants no further requests."""

    request: Request
    stopping: bool


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All choices. Those with finish_reason "abort" were interrupted and hold the tokens generated so far."""

    choices: list[Choice]
    server: int
    version: int  # policy version when the request was sent
    aborted: bool = False  # by another client


@dataclass(frozen=True)
class RequestFailure:
    """A request, or an attempt of it, without a usable response."""

    decision: RetryDecision
    message: str
    retry_after_s: float | None = None
    maybe_stale: bool = False  # the server may have closed an idle connection: retry immediately


@dataclass
class _Attempt:
    """An attempt in flight."""

    server: int
    owner: Owner
    interrupted: bool = False  # by this client: the response arrives immediately and is incomplete


class RequestRunner:
    """Runs requests through the dispatcher.

    `policy_version` is recorded in completions; `model` overrides the model names of the endpoints. `report_suspect` is
    called with a server that cannot be reached or does not answer.
    """

    def __init__(self, config: RolloutConfig, transport: Transport, dispatcher: Dispatcher) -> None:
        self.policy_version = 0
        self.model: str | None = None
        self.counters = ClientCounters()
        self.lock = threading.Lock()  # guards the counters and the attempts, which several event loops share
        self.report_suspect: Callable[[int], None] = lambda _: None
        self._config, self._transport, self._dispatcher = config, transport, dispatcher
        self._random = random.Random()
        self._in_flight: dict[str, _Attempt] = {}
        self._numbers = itertools.count()
        self._id_prefix = f"plinth-{secrets.token_hex(8)}"  # distinguishes our requests from other clients' requests

    async def run(
        self, owner: Owner, prompt_ids: Sequence[int], sampling: SamplingConfig, seed: int | None
    ) -> tuple[Completion | RequestFailure | None, int]:
        """Send a request for `sampling.n` choices until it is answered or has failed for good.

        Returns the outcome, None if nothing was sent because the owner is stopping, and the number of attempts.
        """

        async def once(server: int) -> Completion | RequestFailure | None:
            version, in_flight = self.policy_version, _Attempt(server, owner)
            if owner.stopping:
                return None
            choices = await self._attempt(in_flight, prompt_ids, sampling, seed)
            if isinstance(choices, RequestFailure):
                return choices
            with self.lock:
                self.counters.response_tokens += sum(len(choice.response_ids) for choice in choices)
            aborted = not in_flight.interrupted and any(choice.finish_reason == "abort" for choice in choices)
            if aborted and not any(choice.response_ids.size for choice in choices):
                return RequestFailure(ABORTED, "the server aborted the request")
            return Completion(choices=choices, server=server, version=version, aborted=aborted)

        outcome, _, num_attempts = await self.until_done(once, owner.request.prompt_id, sampling.num_samples)
        if isinstance(outcome, Completion) and outcome.aborted:  # the caller keeps its tokens and resumes the response
            await self.back_off(outcome.server, RequestFailure(ABORTED, ""), 1)
        return outcome, num_attempts

    async def until_done(
        self, once: Callable[[int], Awaitable[T | RequestFailure]], group: str, cost: int
    ) -> tuple[T | RequestFailure, int | None, int]:
        """(outcome of `once(server)` after at most `max_retries` retries, the last server, number of attempts).

        group: the name by which its prompt is routed. cost: samples in flight.
        """
        avoid = set[int]()
        for attempt in itertools.count(1):
            server = await self._dispatcher.acquire(group, cost, avoid)
            if server is None:
                return RequestFailure(CONNECTION_LOST, "no server is left"), None, attempt
            try:
                outcome = await once(server)
            finally:
                self._dispatcher.release(server, cost)
            if not isinstance(outcome, RequestFailure):
                return outcome, server, attempt
            if attempt > self._config.max_retries or not outcome.decision.retry:
                return outcome, server, attempt
            avoid = await self.back_off(server, outcome, attempt)
        raise AssertionError("unreachable")

    def has_attempts_in_flight(self, owners: Collection[Owner]) -> bool:
        wanted = set(map(id, owners))
        with self.lock:
            return any(id(attempt.owner) in wanted for attempt in self._in_flight.values())

    async def interrupt(self, owners: Collection[Owner] | None = None) -> None:
        """Make the servers answer all attempts of `owners` (None: all) immediately, with the tokens generated so far.

        Raises ControlError if a server lacks the route. A server that does not answer is ignored: its attempts end by
        their own time limit.
        """
        chosen = None if owners is None else set(map(id, owners))
        wanted: dict[int, list[str]] = {}
        with self.lock:
            for request_id, attempt in self._in_flight.items():
                if chosen is None or id(attempt.owner) in chosen:
                    attempt.interrupted = True
                    wanted.setdefault(attempt.server, []).append(request_id)
        await asyncio.gather(*(self._abort(server, ids) for server, ids in wanted.items()))

    async def _abort(self, server: int, request_ids: list[str]) -> None:
        body = {"request_ids": [f"cmpl-{request_id}-0" for request_id in request_ids]}  # vLLM's ids of X-Request-Id
        try:
            status, _, raw = await self._transport.exchange(
                server, "POST", "/abort_requests", body, timeout_s=_ABORT_TIMEOUT_S
            )
        except (TimeoutError, aiohttp.ClientError):
            return
        if status in (404, 405):
            raise ControlError(
                "the servers cannot interrupt requests: start them with RolloutConfig(control_routes=True)"
            )
        if status in (401, 403):
            raise ControlError(f"interrupting requests: {error_message(status, raw.decode('utf-8', 'replace'))}")

    async def _attempt(
        self, attempt: _Attempt, prompt_ids: Sequence[int], sampling: SamplingConfig, seed: int | None
    ) -> list[Choice] | RequestFailure:
        request_id = f"{self._id_prefix}-{next(self._numbers)}"
        request, log_probs = attempt.owner.request, self._config.log_probs
        body = partial(completion_body, prompt_ids, sampling, seed=seed, log_probs=log_probs, images=request.images)
        num_routed = len(prompt_ids) if self._config.routes else None
        read = partial(parse_completion, n=sampling.num_samples, log_probs=log_probs, num_routed=num_routed)
        with self.lock:
            self._in_flight[request_id] = attempt
        try:
            return await self.attempt(attempt.server, body, read, request_id=request_id, model=request.model)
        finally:
            with self.lock:
                del self._in_flight[request_id]

    async def attempt(
        self,
        server: int,
        body: Callable[..., Any],
        read: Callable[[Any], T],
        *,
        request_id: str | None = None,
        model: str | None = None,
    ) -> T | RequestFailure:
        """One completion request: what `read` makes of the answer, or why there is none.

        body: the JSON to send, for `model`, else that of the client or the server. read: raises ValueError for an
        incomplete answer.
        """
        try:
            model = model or self.model or await self._transport.model_of(server)
            status, headers, raw = await self._transport.exchange(
                server, "POST", "/v1/completions", body(model=model), request_id=request_id
            )
        except TimeoutError:
            return RequestFailure(TIMED_OUT, f"no answer within {self._config.request_timeout_s:g} s")
        except aiohttp.ServerDisconnectedError as error:
            return RequestFailure(CONNECTION_LOST, f"connection lost: {error}", maybe_stale=True)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return RequestFailure(CONNECTION_LOST, f"connection lost: {type(error).__name__}: {error}")
        except (MalformedAnswerError, aiohttp.ClientResponseError) as error:
            return RequestFailure(MALFORMED, f"malformed answer: {error}")
        if status != 200:
            message = error_message(status, raw)
            return RequestFailure(classify_status(status, message), message, _seconds(headers.get("Retry-After")))
        try:
            answer = read(json.loads(raw))
        except ValueError as error:  # MalformedAnswerError, or not JSON at all
            return RequestFailure(MALFORMED, f"malformed answer: {error}")
        self._dispatcher.succeeded(server)
        return answer

    async def back_off(self, server: int, failure: RequestFailure, attempt: int) -> set[int]:
        """Count a retry, update the state of the server, and wait. Returns the servers to avoid in the next attempt."""
        with self.lock:
            self.counters.num_retries += 1
        if failure.maybe_stale and attempt == 1:
            return {server}  # which is not at fault
        if failure.decision.blame_server:
            self._dispatcher.failed(server, time.monotonic())
        if failure.decision in (CONNECTION_LOST, TIMED_OUT):
            self.report_suspect(server)
        jitter = self._random.random()
        await asyncio.sleep(backoff_s(attempt, jitter=jitter, retry_after_s=failure.retry_after_s))
        return {server} if failure.decision.blame_server else set()


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # an HTTP date: the client's own backoff applies
