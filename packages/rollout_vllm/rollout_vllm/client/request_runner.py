"""Sends one request until it succeeds or fails for good: attempts, retries, and interruption of running requests."""

import asyncio
import itertools
import json
import random
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import aiohttp

from ..config import RolloutConfig, SamplingConfig
from ..errors import ControlError
from ..samples import FailureKind
from .dispatch import Dispatcher
from .metrics import ClientCounters
from .protocol import Choice, MalformedAnswerError, completion_body, engine_request_id, error_message, parse_completion
from .retry import ABORTED, CONNECTION_LOST, MALFORMED, TIMED_OUT, RetryDecision, backoff_s, classify_status
from .transport import Transport

T = TypeVar("T")

_ABORT_TIMEOUT_S = 30.0


class Owner(Protocol):
    """The group that sends a request. stopping: it wants no further requests."""

    stopping: bool


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One request for `sampling.n` choices. group: the name by which its prompt is routed."""

    group: str
    owner: Owner
    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    seed: int | None
    images: str | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All choices. Those with finish_reason "abort" were interrupted and hold the tokens generated so far."""

    choices: list[Choice]
    server: int
    version: int  # policy version when the request was sent
    num_attempts: int


@dataclass(frozen=True, kw_only=True)
class RequestFailure:
    """The request failed and is not retried."""

    kind: FailureKind
    message: str
    num_attempts: int


@dataclass(frozen=True)
class AttemptFailure:
    """An attempt without a usable response."""

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

    def __init__(
        self,
        config: RolloutConfig,
        transport: Transport,
        dispatcher: Dispatcher,
        report_suspect: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.policy_version = 0
        self.model: str | None = None
        self.counters = ClientCounters()
        self.lock = threading.Lock()  # guards the counters and the attempts, which several event loops share
        self._report_suspect = report_suspect
        self._config, self._transport, self._dispatcher = config, transport, dispatcher
        self._random = random.Random()
        self._in_flight: dict[str, _Attempt] = {}
        self._numbers = itertools.count()
        self._id_prefix = f"plinth-{secrets.token_hex(8)}"  # distinguishes our requests from other clients' requests

    async def run(self, request: CompletionRequest) -> Completion | RequestFailure | None:
        """Send the request, with at most `max_retries` retries. None: nothing was sent, since the owner is stopping."""
        avoid = set[int]()
        for attempt in itertools.count(1):
            server = await self._dispatcher.acquire(request.group, request.sampling.num_samples, avoid)
            if server is None:
                return RequestFailure(kind="connection", message="no server is left", num_attempts=attempt)
            version, in_flight = self.policy_version, _Attempt(server, request.owner)
            try:
                if request.owner.stopping:
                    return None
                outcome = await self._attempt(in_flight, request)
            finally:
                self._dispatcher.release(server, request.sampling.num_samples)
            if isinstance(outcome, list):
                self._dispatcher.succeeded(server)
                with self.lock:
                    self.counters.response_tokens += sum(len(choice.response_ids) for choice in outcome)
                completion = Completion(choices=outcome, server=server, version=version, num_attempts=attempt)
                if in_flight.interrupted or all(choice.finish_reason != "abort" for choice in outcome):
                    return completion
                if any(choice.response_ids.size for choice in outcome):
                    # Aborted by another client: the generated tokens are kept, and the caller resumes the response.
                    await self.back_off(server, AttemptFailure(ABORTED, ""), 1)
                    return completion
                outcome = AttemptFailure(ABORTED, "the server aborted the request")
            if attempt > self._config.max_retries or not outcome.decision.retry:
                return RequestFailure(kind=outcome.decision.kind, message=outcome.message, num_attempts=attempt)
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
        body = {"request_ids": [engine_request_id(request_id) for request_id in request_ids]}
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

    async def _attempt(self, attempt: _Attempt, request: CompletionRequest) -> list[Choice] | AttemptFailure:
        request_id = f"{self._id_prefix}-{next(self._numbers)}"
        with self.lock:
            self._in_flight[request_id] = attempt
        log_probs = self._config.log_probs
        body = partial(completion_body, request.prompt_ids, request.sampling, seed=request.seed, log_probs=log_probs)
        body = partial(body, images=request.images)
        num_routed = len(request.prompt_ids) if self._config.routes else None
        read = partial(parse_completion, n=request.sampling.num_samples, log_probs=log_probs, num_routed=num_routed)
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
    ) -> T | AttemptFailure:
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
            return AttemptFailure(TIMED_OUT, f"no answer within {self._config.request_timeout_s:g} s")
        except aiohttp.ServerDisconnectedError as error:
            return AttemptFailure(CONNECTION_LOST, f"connection lost: {error}", maybe_stale=True)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return AttemptFailure(CONNECTION_LOST, f"connection lost: {type(error).__name__}: {error}")
        except (MalformedAnswerError, aiohttp.ClientResponseError) as error:
            return AttemptFailure(MALFORMED, f"malformed answer: {error}")
        if status != 200:
            message = error_message(status, raw.decode("utf-8", "replace"))
            return AttemptFailure(classify_status(status, message), message, _seconds(headers.get("Retry-After")))
        try:
            return read(json.loads(raw))
        except ValueError as error:  # MalformedAnswerError, or not JSON at all
            return AttemptFailure(MALFORMED, f"malformed answer: {error}")

    async def back_off(self, server: int, failure: AttemptFailure, attempt: int) -> set[int]:
        """Count a retry, update the state of the server, and wait. Returns the servers to avoid in the next attempt."""
        with self.lock:
            self.counters.num_retries += 1
        if failure.maybe_stale and attempt == 1:
            return {server}  # which is not at fault
        if failure.decision.blame_server:
            self._dispatcher.failed(server)
        if failure.decision in (CONNECTION_LOST, TIMED_OUT):
            self._report_suspect(server)
        delay = backoff_s(
            attempt,
            base_s=self._config.retry_base_s,
            max_s=self._config.retry_max_s,
            jitter=self._random.random(),
            retry_after_s=failure.retry_after_s,
        )
        await asyncio.sleep(delay)
        return {server} if failure.decision.blame_server else set()


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # an HTTP date: the client's own backoff applies
