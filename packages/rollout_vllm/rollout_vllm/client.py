"""The client: groups of samples from one or several vLLM servers, over HTTP, none lost and none doubled."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from ._loop import LoopThread
from .config import RolloutConfig, SamplingConfig
from .dispatch import Dispatcher
from .errors import NoServerError
from .metrics import ClientCounters, combine, server_metrics
from .protocol import Choice, MalformedAnswerError, completion_body, error_message, parse_completion
from .retry import ABORTED, CONNECTION_LOST, MALFORMED, TIMED_OUT, Verdict, backoff_s, judge_status
from .samples import Endpoint, Failure, FailureKind, GroupResult, Request, Sample
from .transport import Transport

OnGroup = Callable[[GroupResult], Awaitable[None] | None]

_METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class _Setback:
    """An attempt that brought no samples."""

    verdict: Verdict
    message: str
    retry_after_s: float | None = None
    maybe_stale: bool = False  # the server may only have closed an idle connection: try again at once


class RolloutClient:
    """Asks servers for groups of samples.

    Use `generate` from a coroutine or `generate_blocking` from ordinary code. Thread-safe; connections are kept per
    event loop. Close it with `close` (or `aclose` inside the loop that used `generate`).
    """

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig | None = None) -> None:
        if not endpoints:
            raise NoServerError("no endpoints: launch a ServerGroup or give rollout.urls")
        self.endpoints = tuple(endpoints)
        self.config = config or RolloutConfig()
        self.counters = ClientCounters()
        self._dispatcher = Dispatcher(len(self.endpoints), max_in_flight=self.config.max_samples_in_flight)
        self._policy_version = 0
        self._model_override: str | None = None
        self._transport = Transport(self.endpoints, self.config)
        self._lock = threading.Lock()  # guards the counters between loops
        self._background = LoopThread("rollout-client")
        self._random = random.Random()
        self._num_running, self._running_since = 0, 0.0
        self._report_suspect: Callable[[int], None] | None = None

    # ---- generating ----------------------------------------------------------------------------------------------
    async def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        *,
        on_group: OnGroup | None = None,
        deadline_s: float | None = None,
    ) -> list[GroupResult]:
        """`sampling.n` samples for each request; results in request order.

        on_group: called (and awaited) with each group as soon as it is complete, in order of completion. If it
        raises, the rest is cancelled and the exception is raised here.
        deadline_s: seconds from now after which unfinished samples are given up as failures of kind "deadline".

        A sample that cannot be had is a `Failure` in its group, after `config.max_retries` further attempts.
        Cancelling this coroutine closes its connections, which aborts its requests on the servers.
        """
        end = None if deadline_s is None else time.monotonic() + deadline_s
        self._enter()
        tasks = [asyncio.ensure_future(self._group(r, sampling, end, on_group)) for r in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            self._leave()

    def generate_blocking(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        *,
        on_group: OnGroup | None = None,
        deadline_s: float | None = None,
    ) -> list[GroupResult]:
        """`generate` for callers without an event loop. on_group runs in the client's own thread."""
        return self._background.run(self.generate(requests, sampling, on_group=on_group, deadline_s=deadline_s))

    async def sample(
        self, request: Request, sampling: SamplingConfig, *, deadline_s: float | None = None
    ) -> GroupResult:
        """One group: the building stone of multi-turn rollouts."""
        return (await self.generate([request], sampling, deadline_s=deadline_s))[0]

    async def _group(
        self, request: Request, sampling: SamplingConfig, end: float | None, on_group: OnGroup | None
    ) -> GroupResult:
        try:
            async with asyncio.timeout(None if end is None else max(0.0, end - time.monotonic())):
                result = await self._attempts(request, sampling)
        except TimeoutError:
            result = _failed(request, sampling.n, "deadline", "not finished before the deadline", 1)
        self._count(result)
        if on_group is not None:
            answer = on_group(result)
            if inspect.isawaitable(answer):
                await answer
        return result

    async def _attempts(self, request: Request, sampling: SamplingConfig) -> GroupResult:
        limit, wanted = self.config.max_model_len, len(request.prompt_ids) + sampling.max_tokens
        if limit is not None and wanted > limit:
            message = f"prompt of {len(request.prompt_ids)} + max_tokens {sampling.max_tokens} > max_model_len {limit}"
            return _failed(request, sampling.n, "too_long", message, 0)
        started, avoid = time.monotonic(), set[int]()
        for attempt in range(1, self.config.max_retries + 2):
            server = await self._dispatcher.acquire(request.prompt_id, sampling.n, avoid)
            if server is None:
                return _failed(request, sampling.n, "connection", "no server is left", attempt)
            version = self._policy_version
            try:
                outcome = await self._attempt(server, request, sampling)
            finally:
                self._dispatcher.release(server, sampling.n)
            if not isinstance(outcome, _Setback):
                return self._succeed(request, outcome, server, version, attempt, time.monotonic() - started)
            last = attempt == self.config.max_retries + 1
            if last or not outcome.verdict.retry:
                return _failed(request, sampling.n, outcome.verdict.kind, outcome.message, attempt)
            avoid = {server} if outcome.verdict.blame_server else set()
            await self._pause(server, outcome, attempt)
        raise AssertionError("unreachable")

    def _succeed(
        self, request: Request, choices: list[Choice], server: int, version: int, attempt: int, duration_s: float
    ) -> GroupResult:
        self._dispatcher.succeeded(server)
        samples = tuple(
            Sample(
                prompt_id=request.prompt_id,
                sample_index=index,
                response_ids=choice.response_ids,
                log_probs=choice.log_probs,
                finish_reason=choice.finish_reason,
                policy_version=version,
                last_policy_version=self._policy_version,
                server_url=self.endpoints[server].url,
                num_attempts=attempt,
                duration_s=duration_s,
            )
            for index, choice in enumerate(choices)
        )
        return GroupResult(prompt_id=request.prompt_id, samples=samples)

    async def _pause(self, server: int, setback: _Setback, attempt: int) -> None:
        with self._lock:
            self.counters.num_retries += 1
        if setback.maybe_stale and attempt == 1:
            return  # nobody is to blame
        if setback.verdict.blame_server:
            self._dispatcher.failed(server)
        report = self._report_suspect
        if report is not None and setback.verdict in (CONNECTION_LOST, TIMED_OUT):
            report(server)
        delay = backoff_s(
            attempt,
            base_s=self.config.retry_base_s,
            max_s=self.config.retry_max_s,
            jitter=self._random.random(),
            retry_after_s=setback.retry_after_s,
        )
        await asyncio.sleep(delay)

    # ---- one HTTP exchange ---------------------------------------------------------------------------------------
    async def _attempt(self, server: int, request: Request, sampling: SamplingConfig) -> list[Choice] | _Setback:
        try:
            model = self._model_override or await self._transport.model_of(server)
            body = completion_body(request.prompt_ids, sampling, model=model, seed=request.seed)
            status, headers, raw = await self._transport.exchange(server, "POST", "/v1/completions", body)
        except TimeoutError:
            return _Setback(TIMED_OUT, f"no answer within {self.config.request_timeout_s:g} s")
        except aiohttp.ServerDisconnectedError as error:
            return _Setback(CONNECTION_LOST, f"connection lost: {error}", maybe_stale=True)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Setback(CONNECTION_LOST, f"connection lost: {type(error).__name__}: {error}")
        except (MalformedAnswerError, aiohttp.ClientResponseError) as error:
            return _Setback(MALFORMED, f"malformed answer: {error}")
        if status != 200:
            message = error_message(status, raw.decode("utf-8", "replace"))
            return _Setback(judge_status(status, message), message, _seconds(headers.get("Retry-After")))
        try:
            choices = parse_completion(json.loads(raw), sampling.n)
        except ValueError as error:  # MalformedAnswerError, or no JSON at all
            return _Setback(MALFORMED, f"malformed answer: {error}")
        if any(choice.finish_reason == "abort" for choice in choices):
            return _Setback(ABORTED, "the server aborted the request")
        return choices

    # ---- servers out of service ----------------------------------------------------------------------------------
    def block(self, server: int) -> None:
        """Send nothing new to endpoint number `server` until `unblock` (it restarts, or awaits weights)."""
        self._dispatcher.block(server)

    def unblock(self, server: int) -> None:
        self._dispatcher.unblock(server)

    def retire(self, server: int) -> None:
        """Endpoint number `server` will not come back. With none left, all that waits ends as failures."""
        self._dispatcher.retire(server)

    def report_suspects_to(self, report: Callable[[int], None] | None) -> None:
        """Call `report(server)` whenever a server could not be reached or did not answer (see ServerWatch)."""
        self._report_suspect = report

    # ---- versions, figures, end ----------------------------------------------------------------------------------
    @property
    def policy_version(self) -> int:
        return self._policy_version

    def set_policy_version(self, version: int) -> None:
        """To be called when all servers have taken the weights of `version`."""
        self._policy_version = version

    def set_model(self, model: str | None) -> None:
        """Ask for another model name from now on: a LoRA adapter's; None: each endpoint's own."""
        self._model_override = model

    async def fetch_metrics(self) -> dict[str, float]:
        """The client's counters ("client/...") and the servers' own figures, summed and per server.

        A server that does not answer is left out.
        """

        async def one(server: int) -> dict[str, float]:
            with suppress(TimeoutError, aiohttp.ClientError):
                status, _, raw = await self._transport.exchange(server, "GET", "/metrics", timeout_s=_METRICS_TIMEOUT_S)
                if status == 200:
                    return server_metrics(raw.decode("utf-8", "replace"))
            return {}

        per_server = await asyncio.gather(*(one(server) for server in range(len(self.endpoints))))
        with self._lock:
            own = self.counters.as_dict()
        own["client/samples_in_flight"] = float(self._dispatcher.samples_in_flight)
        own["client/groups_waiting"] = float(self._dispatcher.num_waiting)
        return own | combine(per_server)

    def metrics(self) -> dict[str, float]:
        """`fetch_metrics` for callers without an event loop."""
        return self._background.run(self.fetch_metrics())

    def _count(self, result: GroupResult) -> None:
        with self._lock:
            self.counters.num_groups += 1
            self.counters.num_samples += len(result.samples)
            self.counters.num_failures += len(result.failures)
            self.counters.response_tokens += sum(len(s.response_ids) for s in result.samples)
            for failure in result.failures:
                kinds = self.counters.failures_by_kind
                kinds[failure.kind] = kinds.get(failure.kind, 0) + 1

    def _enter(self) -> None:
        with self._lock:
            if self._num_running == 0:
                self._running_since = time.monotonic()
            self._num_running += 1

    def _leave(self) -> None:
        with self._lock:
            self._num_running -= 1
            if self._num_running == 0:
                self.counters.busy_s += time.monotonic() - self._running_since

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._transport.aclose()

    def close(self) -> None:
        """Close what `generate_blocking` opened. Idempotent."""
        if self._background.running:
            self._background.run(self.aclose())
            self._background.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failed(request: Request, n: int, kind: FailureKind, message: str, attempts: int) -> GroupResult:
    failures = tuple(
        Failure(prompt_id=request.prompt_id, sample_index=i, kind=kind, message=message, num_attempts=attempts)
        for i in range(n)
    )
    return GroupResult(prompt_id=request.prompt_id, samples=(), failures=failures)


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # an HTTP date: our own backoff will do
