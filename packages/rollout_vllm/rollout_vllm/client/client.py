"""The client: groups of samples from one or several vLLM servers, over HTTP, none lost and none doubled."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp

from ..config import RolloutConfig, SamplingConfig
from ..errors import ControlError, NoServerError
from ..samples import Endpoint, FirstGroups, GroupResult, PartialGroup, Request
from .attempts import Asker
from .dispatch import Dispatcher
from .group_run import GroupRun
from .metrics import ClientCounters, Rates, combine, server_metrics
from .partial import fresh_group
from .transport import HttpClient

T = TypeVar("T")
OnGroup = Callable[[GroupResult], Awaitable[None] | None]

_METRICS_TIMEOUT_S = 10.0
_CUT_POLL_S = 0.02
_CUT_TIMEOUT_S = 30.0


class RolloutClient(HttpClient):
    """Asks servers for groups of samples.

    Use `generate` from a coroutine; from ordinary code `generate_blocking`, or `run` and `start` for any coroutine of
    this client. Thread-safe; connections are kept per event loop. Close it with `close` (or `aclose` inside the loop
    that used `generate`).
    """

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig | None = None) -> None:
        if not endpoints:
            raise NoServerError("no endpoints: launch a ServerGroup or give rollout.urls")
        self.endpoints = tuple(endpoints)
        self.config = config or RolloutConfig()
        self._dispatcher = Dispatcher(len(self.endpoints), max_in_flight=self.config.max_samples_in_flight)
        super().__init__(self.endpoints, self.config, thread_name="rollout-client")
        self._asker = Asker(self.config, self._transport, self._dispatcher)
        self._urls = [endpoint.url for endpoint in self.endpoints]
        self._rates = Rates()
        self._num_running, self._running_since = 0, 0.0

    # ---- generating ----------------------------------------------------------------------------------------------
    async def generate(
        self,
        requests: Sequence[Request | PartialGroup],
        sampling: SamplingConfig,
        *,
        on_group: OnGroup | None = None,
        deadline_s: float | None = None,
    ) -> list[GroupResult]:
        """`sampling.n` samples for each request; results in request order. A PartialGroup is gone on with.

        on_group: called (and awaited) with each group as soon as it is complete, in order of completion. If it
        raises, the rest is cancelled and the exception is raised here.
        deadline_s: seconds from now after which unfinished samples are given up as failures of kind "deadline".

        A sample that cannot be had is a `Failure` in its group, after `config.max_retries` further attempts.
        Cancelling this coroutine closes its connections, which aborts its requests on the servers.
        """
        end = None if deadline_s is None else time.monotonic() + deadline_s
        runs = [self._run_of(request, sampling) for request in requests]
        self._enter()

        async def one(run: GroupRun) -> GroupResult:
            return await self._deliver(await self._group(run, end), on_group)

        tasks = [asyncio.ensure_future(one(run)) for run in runs]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            await _cancel(tasks)
            raise
        finally:
            self._leave()

    async def generate_first(
        self,
        requests: Sequence[Request | PartialGroup],
        sampling: SamplingConfig,
        *,
        num_groups: int,
        keep_rest: bool = True,
        on_group: OnGroup | None = None,
        deadline_s: float | None = None,
    ) -> FirstGroups:
        """Return as soon as `num_groups` groups are complete, so that the longest responses hold nobody up.

        keep_rest: cut the others short and hand them back with all tokens so far, for a later call to go on with
        (the servers need `RolloutConfig(control_routes=True)`, else ControlError); False: give them up.
        Which groups come first is no chance: short ones do. Kept ones come back later, given-up ones never.
        on_group and deadline_s: as in `generate`; on_group hears of the returned groups alone.
        """
        if not 1 <= num_groups <= len(requests):
            raise ValueError(f"num_groups={num_groups}: allowed is 1..{len(requests)}, the number of requests")
        end = None if deadline_s is None else time.monotonic() + deadline_s
        runs = [self._run_of(request, sampling) for request in requests]
        self._enter()
        tasks = {asyncio.ensure_future(self._group(run, end)): place for place, run in enumerate(runs)}
        try:
            taken = await self._take_first(tasks, num_groups, on_group)
            others = [run for place, run in enumerate(runs) if place not in taken]
            if keep_rest:
                await self._cut_short(others)
        finally:
            await _cancel(list(tasks))
            self._leave()
        rest = [run.partial() for run in others] if keep_rest else []
        return FirstGroups(groups=[taken[place] for place in sorted(taken)], rest=rest)

    async def sample(
        self, request: Request, sampling: SamplingConfig, *, deadline_s: float | None = None
    ) -> GroupResult:
        """One group: the building stone of multi-turn rollouts."""
        return (await self.generate([request], sampling, deadline_s=deadline_s))[0]

    def generate_blocking(
        self,
        requests: Sequence[Request | PartialGroup],
        sampling: SamplingConfig,
        *,
        on_group: OnGroup | None = None,
        deadline_s: float | None = None,
    ) -> list[GroupResult]:
        """`generate` for callers without an event loop. on_group runs in the client's own thread."""
        return self.run(self.generate(requests, sampling, on_group=on_group, deadline_s=deadline_s))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of this client from code without an event loop: `client.run(client.pause())`."""
        return self._background.run(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run it beside the caller: generation while the trainer works. Cancelling the future cancels it."""
        return self._background.submit(coroutine)

    def _run_of(self, request: Request | PartialGroup, sampling: SamplingConfig) -> GroupRun:
        start = fresh_group(request, sampling.n) if isinstance(request, Request) else request
        if len(start.samples) != sampling.n:
            raise ValueError(f"n={sampling.n}: the partial group {start.prompt_id} has {len(start.samples)} samples")
        return GroupRun(start, sampling, self._asker, self._urls, self.config.max_model_len)

    async def _group(self, run: GroupRun, end: float | None) -> GroupResult:
        try:
            async with asyncio.timeout(None if end is None else max(0.0, end - time.monotonic())):
                await run.run()
        except TimeoutError:
            run.fail_unfinished("deadline", "not finished before the deadline")
        return run.result()

    async def _deliver(self, result: GroupResult, on_group: OnGroup | None) -> GroupResult:
        with self._asker.lock:
            self.counters.count_group(result)
        if on_group is not None:
            answer = on_group(result)
            if inspect.isawaitable(answer):
                await answer
        return result

    async def _take_first(
        self, tasks: Mapping[asyncio.Task[GroupResult], int], num_groups: int, on_group: OnGroup | None
    ) -> dict[int, GroupResult]:
        """Groups as they end, until `num_groups` of them are complete."""
        ended: asyncio.Queue[asyncio.Task[GroupResult]] = asyncio.Queue()
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        taken: dict[int, GroupResult] = {}
        num_complete = 0
        while num_complete < num_groups and len(taken) < len(tasks):
            task = await ended.get()
            result = taken[tasks[task]] = await self._deliver(task.result(), on_group)
            num_complete += result.complete
        return taken

    async def _cut_short(self, runs: Sequence[GroupRun]) -> None:
        """Have all that is under way come back with what it has."""
        for run in runs:
            run.stopping = True
        end = time.monotonic() + _CUT_TIMEOUT_S
        while self._asker.has_flights(runs) and time.monotonic() < end:
            await self._asker.cut_short(runs)
            await asyncio.sleep(_CUT_POLL_S)

    # ---- partial rollout -----------------------------------------------------------------------------------------
    async def pause(self, *, timeout_s: float = 60.0) -> None:
        """Stop generating and keep what there is; returns when no request of this client is under way.

        Running `generate` calls wait until `resume` and then go on where they stopped. In between the weights may be
        replaced: the servers are idle, and neither paused nor resumed by this.
        Raises ControlError, everything going on as before: a server has no route for it
        (`RolloutConfig(control_routes=True)`), or did not answer within timeout_s.
        """
        self._dispatcher.pause()
        end = time.monotonic() + timeout_s
        try:
            while self._dispatcher.samples_in_flight:
                if time.monotonic() > end:
                    raise ControlError(f"pause: requests are still under way after {timeout_s:g} s")
                await self._asker.cut_short()
                await asyncio.sleep(_CUT_POLL_S)
        except BaseException:
            self._dispatcher.resume()
            raise

    def resume(self, policy_version: int | None = None) -> None:
        """Go on generating; policy_version: of the weights that all servers have now, None: the same as before."""
        if policy_version is not None:
            self.set_policy_version(policy_version)
        self._dispatcher.resume()

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
        self._asker.report_suspect = report

    # ---- versions, figures, end ----------------------------------------------------------------------------------
    @property
    def counters(self) -> ClientCounters:
        return self._asker.counters

    @property
    def policy_version(self) -> int:
        return self._asker.policy_version

    def set_policy_version(self, version: int) -> None:
        """To be called when all servers have taken the weights of `version`."""
        self._asker.policy_version = version

    def set_model(self, model: str | None) -> None:
        """Ask for another model name from now on: a LoRA adapter's; None: each endpoint's own."""
        self._asker.model = model

    async def fetch_metrics(self) -> dict[str, float]:
        """The client's counters ("client/...") and the servers' own figures, summed and per server ("server_0/...").

        Tokens a second are those since the call before. A server that does not answer is left out.
        """

        async def one(server: int) -> dict[str, float]:
            with suppress(TimeoutError, aiohttp.ClientError):
                status, _, raw = await self._transport.exchange(server, "GET", "/metrics", timeout_s=_METRICS_TIMEOUT_S)
                if status == 200:
                    figures = server_metrics(raw.decode("utf-8", "replace"))
                    return figures | self._rates.of(server, figures, time.monotonic())
            return {}

        per_server = await asyncio.gather(*(one(server) for server in range(len(self.endpoints))))
        load = self._dispatcher.load
        with self._asker.lock:
            own = self.counters.as_dict()
            retries = [self.counters.retries_by_server.get(server, 0) for server in range(len(load))]
        own["client/samples_in_flight"] = float(sum(load))
        own["client/groups_waiting"] = float(self._dispatcher.num_waiting)
        totals = combine(
            [
                f | {"client_retries": float(r), "client_samples_in_flight": float(n)}
                for f, r, n in zip(per_server, retries, load, strict=True)
            ]
        )
        own["queue_depth"] = self._dispatcher.samples_waiting + totals.get("num_waiting", 0.0)
        return own | totals

    def metrics(self) -> dict[str, float]:
        """`fetch_metrics` for callers without an event loop."""
        return self.run(self.fetch_metrics())

    def _enter(self) -> None:
        with self._asker.lock:
            if self._num_running == 0:
                self._running_since = time.monotonic()
            self._num_running += 1

    def _leave(self) -> None:
        with self._asker.lock:
            self._num_running -= 1
            if self._num_running == 0:
                self.counters.busy_s += time.monotonic() - self._running_since


async def _cancel(tasks: Sequence[asyncio.Task[GroupResult]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
