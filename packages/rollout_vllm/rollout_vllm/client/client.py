"""The rollout client: generates groups of samples on one or several vLLM servers over HTTP."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import aiohttp

from plinth_base import Endpoint
from plinth_base.endpoint import error_message

from ..config import RolloutConfig, SamplingConfig, require
from ..errors import ControlError, UnlabeledTokensError
from ..samples import Group, Request
from .balanced import BalancedClient
from .group_run import GroupRun
from .metrics import ClientCounters, server_metrics
from .transport import call_back, cancel, first_complete, gather_or_cancel

OnGroup = Callable[[Group], Awaitable[None] | None]

_METRICS_TIMEOUT_S = 10.0
_POLICY_VERSION_ROUTE = "/plinth/policy_version"
_UNLABELED = "it does not note the policy version of tokens; start it with ServerGroup or launch_on_ray"
_INTERRUPT_POLL_S = 0.02
_INTERRUPT_TIMEOUT_S = 30.0


class Gate:
    """Requests that can be held together: see `RolloutClient.hold`. Open at first; of one event loop."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.runs: set[GroupRun] = set()


class RolloutClient(BalancedClient):
    """Generates groups of samples. Every requested sample is returned exactly once, as a `Sample` or a `Failure`.

    Use `generate` in a coroutine. In blocking code use `generate_blocking`, or `run` and `start` for any coroutine of
    this client. Thread-safe; connections are kept per event loop. Close the client with `close` (or `aclose` in the
    event loop that used `generate`).
    """

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig | None = None) -> None:
        super().__init__(endpoints, config or RolloutConfig(), thread_name="rollout-client")
        self._num_running, self._running_since = 0, 0.0
        self._listed: dict[GroupRun, None] = {}  # in the order of the requests

    # ---- generating ----------------------------------------------------------------------------------------------
    async def generate(
        self,
        requests: Sequence[Request | Group],
        sampling: SamplingConfig,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Generate `sampling.n` samples for each request. Results are in request order. A Group is resumed.

        on_group: called (and awaited) with each group as soon as it ends, in order of completion. If it raises, the
        other groups are cancelled and the exception propagates.

        A sample that still fails after `config.max_retries` retries is a `Failure` in its group. Cancelling this
        coroutine closes its connections, which aborts its requests on the servers.
        """
        runs = [self._run_of(request, sampling) for request in requests]

        async def one(run: GroupRun) -> Group:
            with self._runner.lock:
                self._listed[run] = None
            try:
                result = await self._group(run)
            finally:
                with self._runner.lock:
                    del self._listed[run]
            await self._deliver(result, on_group)
            return result

        with self._counting_busy_time():
            return await gather_or_cancel(one(run) for run in runs)

    async def generate_first(
        self,
        requests: Sequence[Request | Group],
        sampling: SamplingConfig,
        *,
        num_groups: int,
        keep_rest: bool = True,
        on_group: OnGroup | None = None,
    ) -> tuple[list[Group], list[Group]]:
        """Generate, and return as soon as `num_groups` groups are complete. The longest responses do not delay it.

        keep_rest: interrupt the other groups and return them with all tokens so far, so that a later call can resume
        them (requires `RolloutConfig(control_routes=True)`, else ControlError). False: discard them. Groups with short
        responses complete first, so discarding the others biases the batch toward short responses.
        on_group: as in `generate`, for the returned groups only.
        """
        require(1 <= num_groups <= len(requests), "num_groups", num_groups, f"1 to {len(requests)} requests")
        runs = [self._run_of(request, sampling) for request in requests]
        with self._counting_busy_time():
            tasks = [asyncio.ensure_future(self._group(run)) for run in runs]
            try:
                deliver = partial(self._deliver, on_group=on_group)
                first = await first_complete(tasks, num_groups, is_complete=lambda one: one.complete, on_end=deliver)
                others = [run for index, run in enumerate(runs) if index not in first]
                if keep_rest:
                    await self._interrupt(others)
            finally:
                await cancel(tasks)
        rest = [run.partial() for run in others] if keep_rest else []
        return [first[index] for index in sorted(first)], rest

    async def sample(self, request: Request, sampling: SamplingConfig, *, gate: Gate | None = None) -> Group:
        """Generate one group. Multi-turn rollouts are built on this. gate: see `hold`."""
        if gate is None:
            return (await self.generate([request], sampling))[0]
        start: Request | Group = request
        while True:
            await gate.is_open.wait()
            run = self._run_of(start, sampling)
            gate.runs.add(run)
            try:
                with self._counting_busy_time():
                    await run.run()
            finally:
                gate.runs.discard(run)
            if run.is_finished:
                await self._deliver(run.result(), None)
                return run.result()
            start = run.partial()

    async def hold(self, gate: Gate) -> None:
        """Close the gate: its requests are interrupted and keep their tokens; they go on after `gate.is_open.set()`.

        Requires `RolloutConfig(control_routes=True)`, else ControlError.
        """
        gate.is_open.clear()
        await self._interrupt(list(gate.runs))

    def partial_groups(self) -> list[Group]:
        """The groups that `generate` works on now, with the tokens that the servers have returned so far.

        Those are the tokens up to the last `pause`, and whole responses of resumed samples. Callable from any thread.
        """
        with self._runner.lock:
            return [run.partial() for run in self._listed]

    def generate_blocking(
        self,
        requests: Sequence[Request | Group],
        sampling: SamplingConfig,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """`generate` for callers without an event loop. on_group runs in the client's thread."""
        return self.run(self.generate(requests, sampling, on_group=on_group))

    def _run_of(self, request: Request | Group, sampling: SamplingConfig) -> GroupRun:
        start = Group.fresh(request, sampling.num_samples) if isinstance(request, Request) else request
        require(
            len(start.samples) == sampling.num_samples,
            "n",
            sampling.num_samples,
            f"{len(start.samples)}, as in {start.prompt_id}",
        )
        return GroupRun(start, sampling, self._runner, self._urls, self.config.max_model_len)

    async def _group(self, run: GroupRun) -> Group:
        await run.run()
        return run.result()

    async def _deliver(self, result: Group, on_group: OnGroup | None) -> None:
        with self._runner.lock:
            self.counters.count_group(result)
        await call_back(on_group, result)

    async def _interrupt(self, runs: Sequence[GroupRun]) -> None:
        """Make the servers return all requests of `runs` with the tokens generated so far."""
        for run in runs:
            run.stopping = True
        end = time.monotonic() + _INTERRUPT_TIMEOUT_S
        while self._runner.has_attempts_in_flight(runs) and time.monotonic() < end:
            await self._runner.interrupt(runs)
            await asyncio.sleep(_INTERRUPT_POLL_S)

    # ---- partial rollout -----------------------------------------------------------------------------------------
    async def pause(self, *, timeout_s: float = 60.0) -> None:
        """Interrupt all requests of this client and keep their tokens. Returns when no request is in flight.

        Running `generate` calls wait until `resume` and then continue with the tokens they have. In between, the
        weights can be replaced: the servers are idle. This neither pauses nor resumes the servers themselves.

        Raises ControlError if a server lacks the route (`RolloutConfig(control_routes=True)`) or does not answer
        within timeout_s. Generation then continues as before.
        """
        self.dispatcher.pause()
        end = time.monotonic() + timeout_s
        try:
            while self.dispatcher.samples_in_flight:
                if time.monotonic() > end:
                    raise ControlError(f"pause: requests are still in flight after {timeout_s:g} s")
                await self._runner.interrupt()
                await asyncio.sleep(_INTERRUPT_POLL_S)
        except BaseException:
            self.dispatcher.resume()
            raise

    def resume(self, policy_version: int | None = None) -> None:
        """Resume generation. policy_version: version of the weights that all servers hold now; None: unchanged."""
        if policy_version is not None:
            self.set_policy_version(policy_version)
        self.dispatcher.resume()

    # ---- policy version and metrics ------------------------------------------------------------------------------
    @property
    def counters(self) -> ClientCounters:
        """Totals of this client since it was created."""
        return self._runner.counters

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one call generated, so far."""
        with self._runner.lock:
            now = time.monotonic() - self._running_since if self._num_running else 0.0
            return self.counters.busy_s + now

    @property
    def policy_version(self) -> int:
        """The version with which new tokens are recorded."""
        return self._runner.policy_version

    def set_policy_version(self, version: int) -> None:
        """Set the version of new tokens; call it when all servers hold the weights of `version`."""
        self._runner.policy_version = version

    async def fetch_policy_versions(self, servers: Sequence[int] | None = None) -> list[int | None]:
        """The policy version of each server's weights, as published by the last push; None: no push had a version.

        Args:
            servers: indices of the servers to ask, in the order of the result; None: all.

        Servers of `ServerGroup` and `launch_on_ray` note the version of every token that they sample, so
        `Sample.version_spans` is exact also when weights are pushed while they generate (weight_sync's
        `SyncConfig(running_requests="keep")`).

        Raises UnlabeledTokensError if one of them does not note versions, other ControlErrors if one does not answer.
        """
        asked = range(len(self.endpoints)) if servers is None else servers
        answers = await asyncio.gather(*map(self._policy_version_of, asked))
        problems = {self._urls[i]: text for i, text in zip(asked, answers, strict=True) if isinstance(text, str)}
        if problems:
            text = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
            kind = UnlabeledTokensError if _UNLABELED in problems.values() else ControlError
            raise kind(f"policy versions of the servers: {text}", problems)
        return [version for version in answers if not isinstance(version, str)]

    async def _policy_version_of(self, server: int) -> int | str | None:
        """A server's policy version, or why it is not known."""
        try:
            status, _, raw = await self._transport.exchange(
                server, "GET", _POLICY_VERSION_ROUTE, timeout_s=_METRICS_TIMEOUT_S
            )
            if status == 200:
                version = int(json.loads(raw)["policy_version"])
                return None if version < 0 else version
        except (TimeoutError, aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        if status in (404, 405):
            return _UNLABELED
        return error_message(status, raw)

    def set_model(self, model: str | None) -> None:
        """Request this model name from now on, e.g. a LoRA adapter's; None: the model of each endpoint."""
        self._runner.model = model

    async def fetch_metrics(self) -> dict[str, float]:
        """The client's counters ("client/...") and the servers' metrics, summed over those that answer."""
        totals = Counter[str]()

        async def add(server: int) -> None:
            with suppress(TimeoutError, aiohttp.ClientError, ValueError):
                status, _, raw = await self._transport.exchange(server, "GET", "/metrics", timeout_s=_METRICS_TIMEOUT_S)
                if status == 200:
                    totals.update(server_metrics(raw.decode("utf-8", "replace")))

        await asyncio.gather(*map(add, range(len(self.endpoints))))
        with self._runner.lock:
            return self.counters.as_dict() | totals

    def metrics(self) -> dict[str, float]:
        """`fetch_metrics` for callers without an event loop."""
        return self.run(self.fetch_metrics())

    @contextmanager
    def _counting_busy_time(self) -> Iterator[None]:
        """Counts the time during which at least one call generates."""
        with self._runner.lock:
            if self._num_running == 0:
                self._running_since = time.monotonic()
            self._num_running += 1
        try:
            yield
        finally:
            with self._runner.lock:
                self._num_running -= 1
                if self._num_running == 0:
                    self.counters.busy_s += time.monotonic() - self._running_since
