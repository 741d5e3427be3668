"""One request until it is answered or given up: attempts, retries, and cutting short what is under way."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from ..config import RolloutConfig, SamplingConfig
from ..errors import ControlError
from ..samples import FailureKind
from .dispatch import Dispatcher
from .metrics import ClientCounters
from .protocol import Choice, MalformedAnswerError, completion_body, engine_request_id, error_message, parse_completion
from .retry import ABORTED, CONNECTION_LOST, MALFORMED, TIMED_OUT, Verdict, backoff_s, judge_status
from .transport import Transport

_ABORT_TIMEOUT_S = 30.0


class Owner(Protocol):
    """Whose request it is. stopping: no longer wanted."""

    stopping: bool


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request for `sampling.n` choices. group: its prompt's routing name."""

    group: str
    owner: Owner
    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All choices; those with finish_reason "abort" were cut short and hold what they had."""

    choices: list[Choice]
    server: int
    version: int  # of the policy, when the request was sent
    num_attempts: int


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """No answer will come."""

    kind: FailureKind
    message: str
    num_attempts: int


@dataclass(frozen=True)
class _Setback:
    """An attempt that brought nothing."""

    verdict: Verdict
    message: str
    retry_after_s: float | None = None
    maybe_stale: bool = False  # the server may only have closed an idle connection: try again at once


@dataclass
class _Flight:
    """An attempt under way."""

    server: int
    owner: Owner
    cut: bool = False  # by us: the answer will come at once, short


class Asker:
    """Sends calls through the dispatcher. `policy_version` is stamped on answers, `model` overrides the endpoints'."""

    def __init__(self, config: RolloutConfig, transport: Transport, dispatcher: Dispatcher) -> None:
        self.policy_version = 0
        self.model: str | None = None
        self.counters = ClientCounters()
        self.lock = threading.Lock()  # guards the counters and the flights, between loops
        self.report_suspect: Callable[[int], None] | None = None
        self._config, self._transport, self._dispatcher = config, transport, dispatcher
        self._random = random.Random()
        self._flights: dict[str, _Flight] = {}
        self._numbers = itertools.count()
        self._name = f"plinth-{secrets.token_hex(8)}"  # request ids are ours alone, whoever else asks the server

    async def ask(self, call: Call) -> Answer | GivenUp | None:
        """The answer, after at most `max_retries` further attempts. None: nothing was sent, the owner is stopping."""
        avoid = set[int]()
        for attempt in itertools.count(1):
            server = await self._dispatcher.acquire(call.group, call.sampling.n, avoid)
            if server is None:
                return GivenUp(kind="connection", message="no server is left", num_attempts=attempt)
            version, flight = self.policy_version, _Flight(server, call.owner)
            try:
                if call.owner.stopping:
                    return None
                outcome = await self._attempt(flight, call)
            finally:
                self._dispatcher.release(server, call.sampling.n)
            if isinstance(outcome, list):
                self._dispatcher.succeeded(server)
                with self.lock:
                    self.counters.response_tokens += sum(len(choice.response_ids) for choice in outcome)
                answer = Answer(choices=outcome, server=server, version=version, num_attempts=attempt)
                if flight.cut or all(choice.finish_reason != "abort" for choice in outcome):
                    return answer
                if any(choice.response_ids for choice in outcome):
                    await self._pause(server, _Setback(ABORTED, ""), 1)
                    return answer  # somebody else's abort: what was generated is kept, and gone on with
                outcome = _Setback(ABORTED, "the server aborted the request")
            if attempt > self._config.max_retries or not outcome.verdict.retry:
                return GivenUp(kind=outcome.verdict.kind, message=outcome.message, num_attempts=attempt)
            avoid = {server} if outcome.verdict.blame_server else set()
            await self._pause(server, outcome, attempt)
        raise AssertionError("unreachable")

    def has_flights(self, owners: Collection[Owner]) -> bool:
        """Whether an attempt of `owners` is under way."""
        wanted = set(map(id, owners))
        with self.lock:
            return any(id(flight.owner) in wanted for flight in self._flights.values())

    async def cut_short(self, owners: Collection[Owner] | None = None) -> None:
        """Have the servers answer at once, with what they have, all attempts of `owners` (None: all).

        Raises ControlError when a server has no such route. One that does not answer is left to the attempt's own end.
        """
        chosen = None if owners is None else set(map(id, owners))
        wanted: dict[int, list[str]] = {}
        with self.lock:
            for request_id, flight in self._flights.items():
                if chosen is None or id(flight.owner) in chosen:
                    flight.cut = True
                    wanted.setdefault(flight.server, []).append(request_id)
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
                "the servers cannot cut requests short: start them with RolloutConfig(control_routes=True)"
            )
        if status in (401, 403):
            raise ControlError(f"cutting requests short: {error_message(status, raw.decode('utf-8', 'replace'))}")

    async def _attempt(self, flight: _Flight, call: Call) -> list[Choice] | _Setback:
        request_id = f"{self._name}-{next(self._numbers)}"
        with self.lock:
            self._flights[request_id] = flight
        try:
            model = self.model or await self._transport.model_of(flight.server)
            body = completion_body(call.prompt_ids, call.sampling, model=model, seed=call.seed)
            status, headers, raw = await self._transport.exchange(
                flight.server, "POST", "/v1/completions", body, request_id=request_id
            )
        except TimeoutError:
            return _Setback(TIMED_OUT, f"no answer within {self._config.request_timeout_s:g} s")
        except aiohttp.ServerDisconnectedError as error:
            return _Setback(CONNECTION_LOST, f"connection lost: {error}", maybe_stale=True)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Setback(CONNECTION_LOST, f"connection lost: {type(error).__name__}: {error}")
        except (MalformedAnswerError, aiohttp.ClientResponseError) as error:
            return _Setback(MALFORMED, f"malformed answer: {error}")
        finally:
            with self.lock:
                del self._flights[request_id]
        if status != 200:
            message = error_message(status, raw.decode("utf-8", "replace"))
            return _Setback(judge_status(status, message), message, _seconds(headers.get("Retry-After")))
        try:
            return parse_completion(json.loads(raw), call.sampling.n)
        except ValueError as error:  # MalformedAnswerError, or no JSON at all
            return _Setback(MALFORMED, f"malformed answer: {error}")

    async def _pause(self, server: int, setback: _Setback, attempt: int) -> None:
        """Note a retry and wait as long as it should."""
        with self.lock:
            self.counters.count_retry(server)
        if setback.maybe_stale and attempt == 1:
            return  # nobody is to blame
        if setback.verdict.blame_server:
            self._dispatcher.failed(server)
        report = self.report_suspect
        if report is not None and setback.verdict in (CONNECTION_LOST, TIMED_OUT):
            report(server)
        delay = backoff_s(
            attempt,
            base_s=self._config.retry_base_s,
            max_s=self._config.retry_max_s,
            jitter=self._random.random(),
            retry_after_s=setback.retry_after_s,
        )
        await asyncio.sleep(delay)


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # an HTTP date: our own backoff will do
