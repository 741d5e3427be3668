"""Pushes the actor's weights to the rollout servers, and restarts servers that die or hang.

A lock guards every push. The training loop holds the lock in `changing_weights` (update, checkpoint, sync) and releases
it while it generates. A restarted server gets its weights during generation, when all ranks are idle and hold the
published version. So two pushes never overlap, and no push runs during an update.

With `MemoryTurns` the same lock guards the GPUs' memory: a server that died while the trainer works is started again
when the servers have the memory, and the trainer waits for a server that starts.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rollout_vllm import ControlError, Endpoint, RolloutClient, ServerGroup, UnlabeledTokensError
from weight_sync import ReceiverError, SyncConfig, SyncReport, WeightSyncError

from ..errors import RankError, RankLost, RlRuntimeError
from ..ranks.model_handle import ModelHandle
from ..samples import Phase
from .memory_turns import MemoryTurns, Turn
from .watched_servers import WatchedServers

_NOTICE_S = 20.0
"""Longest time, in seconds, in which a server's supervisor notices that the server has died."""
_ADAPTER = "policy-adapter"
"""The model name under which the servers serve the actor's adapters."""


class RolloutServers:
    """Pushes the weights of `actor` to the servers and restarts each server up to `max_restarts` times.

    A context manager: enter it when the servers are ready.

    Args:
        report: called with one line of text for each event of a server.
        adapters_alone: push only the actor's LoRA adapters; the servers keep the base model.
        pushes_base: with `adapters_alone`, servers get the ranks' base model once; False: they have one of their own.
        holds_requests: a push interrupts requests, which continue with the new weights; False: there are none.
        turns: the servers sleep while the trainer works, and sleep now; None: they share the GPUs' memory.
    """

    def __init__(
        self,
        servers: ServerGroup,
        client: RolloutClient,
        actor: ModelHandle,
        sync: SyncConfig,
        *,
        max_restarts: int,
        report: Callable[[str], None],
        adapters_alone: bool = False,
        pushes_base: bool = True,
        holds_requests: bool = False,
        turns: MemoryTurns | None = None,
    ) -> None:
        self._servers, self._client, self._actor, self._sync = servers, client, actor, sync
        self._adapter = _ADAPTER if adapters_alone else None
        self._pushes_base = pushes_base
        client.set_model(self._adapter)
        self._report = report
        self._holds_requests = holds_requests
        self._weights = threading.RLock()
        self._waiting = 0  # restarted servers that wait for their weights
        self._connected: list[int] = []
        self._transports: dict[str, str] = {}
        self._failures_recovered = [0] * len(servers.endpoints)
        self.num_restarts = 0
        """Number of successful restarts."""
        self._lost: RankLost | None = None
        self._counting = threading.Lock()
        self._closing = threading.Event()
        self._watched: WatchedServers | None = None
        if servers.servers and max_restarts:
            self._watched = WatchedServers(
                servers,
                client,
                kind="rollout server",
                on_restart=self._push_to_restarted,
                max_restarts=max_restarts,
                restarting=nullcontext if turns is None else self._with_memory,
                report=report,
            )
        self._watch = None if self._watched is None else self._watched.watch
        self._turns = turns
        if turns is not None and self._watch is not None:
            turns.on_failure = self._restart_failed

    def __enter__(self) -> "RolloutServers":
        if self._watched is not None:
            self._watched.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._watched is not None:
            self._watched.close()

    @contextmanager
    def changing_weights(self, phase: Phase = nullcontext) -> Iterator[None]:
        """Context in which the caller may change the weights and has to push them; restarted servers wait for its end.

        With turns, the trainer has the GPUs' memory until `push`. `phase` times the change.
        """
        while self._waiting:  # the lock is not fair, and a loop that never waits for samples would keep it
            time.sleep(0.01)
        with self._weights:
            if self._turns is not None and self._turns.turn is Turn.GENERATION:
                running = [server.endpoint for server in self._servers.servers if server.alive]  # given up ones, too
                self._turns.start_training(running, phase)
            yield

    @contextmanager
    def lending_memory(self) -> Iterator[None]:
        """Context in which the ranks compute between two steps without changing the weights.

        With turns, the servers lose their weights and get them again at its end.
        """
        with self.changing_weights():
            yield
            if self._turns is not None:
                self.push(self._client.policy_version)

    def push(self, version: int, phase: Phase = nullcontext) -> SyncReport | None:
        """Pushes the actor's weights to all running servers as policy `version`; None if no server is running.

        A restarting server gets the weights before it receives requests. Servers that a push does not reach are
        restarted. With turns, the servers then have the GPUs' memory.
        """
        with self._weights:
            if self._turns is not None:
                self._turns.start_push(self._endpoints(self._serving()), phase)
            with phase("sync"), self._requests_held():
                report = self._push_to_serving(version)
                self._client.set_policy_version(version)
                self._check_labels(version)
            if self._turns is not None:
                self._turns.start_generation(self._endpoints(self._serving()), phase)
            return report

    def _check_labels(self, version: int) -> None:
        """Requires servers that label tokens with their weights, if requests run through a push.

        Servers that die meanwhile are left out.
        """
        if not self._holds_requests or not self._sync.holds_requests:
            return
        while serving := self._serving():
            try:
                versions = self._client.run(self._client.fetch_policy_versions(serving))
            except ControlError as error:
                unlabeled = isinstance(error, UnlabeledTokensError)  # no sign that a server has died
                if unlabeled or self._watch is None or not self._has_died(serving):
                    raise self._cut_instead(str(error)) from error
                continue
            labels = zip(self._endpoints(serving), versions, strict=True)
            if wrong := {endpoint.url: label for endpoint, label in labels if label != version}:
                raise self._cut_instead(f"the servers {wrong} do not label tokens with policy version {version}")
            return

    def _cut_instead(self, problem: str) -> RlRuntimeError:
        """Requests cannot run through a push."""
        value = self._sync.running_requests
        return RlRuntimeError(problem, field="sync.running_requests", value=value, allowed="wait")

    @contextmanager
    def _requests_held(self) -> Iterator[None]:
        """Requests in flight return what they have, and continue at the end of the context; or the push holds them."""
        if not self._holds_requests or self._sync.holds_requests:
            yield
            return
        self._client.run(self._client.pause(timeout_s=self._sync.pause_timeout_s))
        try:
            yield
        finally:
            self._client.resume()

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call: what was moved for turns."""
        return {} if self._turns is None else self._turns.take_metrics()

    def check(self) -> None:
        """Raises the error that ended the servers' work.

        Raises:
            rollout_vllm.ServerDiedError: no server is left, or one died and restarts are disabled.
            RankLost: a restarted server did not get its weights, because a rank was lost.
        """
        if self._lost is not None:
            raise self._lost
        if self._watched is None:
            self._servers.check()
        else:
            self._watched.check()

    def _push_to_serving(self, version: int) -> SyncReport | None:
        while serving := self._serving():
            try:
                if serving != self._connected:
                    self._connect(self._endpoints(serving))
                    self._connected = serving
                report: SyncReport = self._actor.push_weights(version)
                self._report_transports(report)
                return report
            except RankError as error:
                self._connected = []
                if self._watch is None or isinstance(error, RankLost):
                    raise
                if self._has_died(serving):
                    continue
                if not _restart_may_help(error):
                    raise
                # The pusher has already retried, and the servers are still paused.
                self._report(f"restarting rollout servers {serving}, because the weight push failed: {error}")
                for index in serving:
                    self._watch.restart(index)
        return None

    def _push_to_restarted(self, index: int, endpoint: Endpoint) -> int:
        """Pushes the current weights to a restarted server; called by the watch."""
        with self._its_turn():
            if self._closing.is_set():
                raise RlRuntimeError("the run is over")
            version = self._client.policy_version
            self._connected = []
            failures = self._num_failures()[index]
            try:
                self._connect([endpoint])
                self._report_transports(self._actor.push_weights(version))
            except RankLost as error:  # not the server's fault: the loop ends, and begins again with new ranks
                self._lost = error
                raise
            self._failures_recovered[index] = failures
            self.num_restarts += 1
            return version

    def _report_transports(self, report: SyncReport) -> None:
        """Reports how the weights travel to the servers, after the first push and when that changes."""
        if not report.transports.items() <= self._transports.items():
            self._transports |= report.transports
            routes = "; ".join(f"{url}: {transport}" for url, transport in report.transports.items())
            self._report(f"weights: rank 0 -> {routes}")

    @contextmanager
    def _with_memory(self, index: int) -> Iterator[None]:
        """Waits until the servers have the GPUs' memory, and keeps it while server `index` starts."""
        del index
        with self._its_turn():
            assert self._turns is not None
            if self._closing.is_set() or self._turns.turn is not Turn.GENERATION:
                raise RlRuntimeError("the run is over")
            yield

    @contextmanager
    def _its_turn(self) -> Iterator[None]:
        """The lock for a restarted server, before the loop takes it again."""
        with self._counting:
            self._waiting += 1
        try:
            self._weights.acquire()
        finally:
            with self._counting:
                self._waiting -= 1
        try:
            yield
        finally:
            self._weights.release()

    def _restart_failed(self, error: ControlError) -> None:
        """Stops servers that did not sleep or wake up, which frees their memory; the watch starts them again."""
        assert self._watch is not None
        self._report(f"restarting rollout servers: {error}")
        for index, endpoint in enumerate(self._servers.endpoints):
            if endpoint.url in error.problems:
                self._watch.restart(index)

    def _endpoints(self, indices: list[int]) -> list[Endpoint]:
        return [self._servers.endpoints[index] for index in indices]

    def _connect(self, endpoints: list[Endpoint]) -> None:
        version = self._client.policy_version
        self._actor.connect_servers(endpoints, self._sync, self._adapter, version, base=self._pushes_base)

    def _serving(self) -> list[int]:
        """Indices of the running servers that hold the current weights."""
        if self._watch is None:
            return list(range(len(self._servers.endpoints)))
        failures = self._num_failures()
        return [
            index
            for index, server in enumerate(self._servers.servers)
            if server.alive and failures[index] == self._failures_recovered[index]
        ]

    def _num_failures(self) -> list[int]:
        """Number of deaths and hangs of each server."""
        failures = [0] * len(self._servers.servers)
        for event in list(self._watch.events) if self._watch is not None else ():
            failures[event.server] += event.kind in ("died", "hung")
        return failures

    def _has_died(self, serving: list[int]) -> bool:
        """True if one of these servers has died; waits until its supervisor would have noticed."""
        deadline = time.monotonic() + _NOTICE_S
        while self._serving() == serving:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def _restart_may_help(error: RankError) -> bool:
    """True if the sync failed in transit. A plan that a server rejected would be rejected again."""
    cause = error.cause
    return isinstance(cause, WeightSyncError) and (not isinstance(cause, ReceiverError) or cause.retryable)
