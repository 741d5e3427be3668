"""Keeps the current weights on all rollout servers that serve, and restarts servers that die.

Pushes hold a lock. The loop holds it while the weights change (`changing_weights`: updates, sync, checkpoint). A
restarted server waits for the lock and gets the weights while the loop generates: then all ranks are idle and the
weights are those of the published version. So the ranks never run two pushes at once, or a push during an update.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout_vllm import Endpoint, RolloutClient, ServerGroup, ServerWatch
from weight_sync import ReceiverError, SyncConfig, SyncReport, WeightSyncError

from ..errors import RankError, RlRuntimeError
from ..ranks.model_handle import ModelHandle

_NOTICE_S = 20.0
"""Seconds that the supervisor of a server may take to notice that the server has died."""
_ADAPTER = "policy-adapter"
"""The model name under which the servers serve the actor's adapters."""


class RolloutServers:
    """Pushes the weights of `actor` to the servers; restarts each server up to `max_restarts` times.

    A context, to be entered when the servers are ready.

    Args:
        report: receives a line for each event of a server.
        adapters_alone: the servers keep the base model; pushes and requests use the actor's LoRA adapters.
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
    ) -> None:
        self._servers, self._client, self._actor, self._sync = servers, client, actor, sync
        self._adapter = _ADAPTER if adapters_alone else None
        client.set_model(self._adapter)
        self._report = report
        self._weights = threading.RLock()
        self._connected: list[int] = []
        self._failures_recovered = [0] * len(servers.endpoints)
        self._num_restarts = 0
        self._num_reported = 0
        self._reporting = threading.Lock()
        self._closing = threading.Event()
        self._watch: ServerWatch | None = None
        if servers.servers and max_restarts:
            self._watch = ServerWatch(servers, client, on_restart=self._bring_up_to_date, max_restarts=max_restarts)

    def __enter__(self) -> "RolloutServers":
        if self._watch is not None:
            self._watch.start()
            threading.Thread(target=self._report_until_closed, name="report-server-events", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._watch is None:
            return
        self._watch.stop(abort_restarts=True)

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Inside this context the caller can change and push the weights."""
        with self._weights:
            yield

    def push(self, version: int) -> SyncReport | None:
        """Pushes the actor's weights to every server that serves, as policy `version`; None if no server does.

        The other servers get the weights before they serve again. Servers that a push does not reach are restarted.
        """
        with self._weights:
            report = self._push_to_serving(version)
            self._client.set_policy_version(version)
            return report

    def check(self) -> None:
        """Raises rollout_vllm.ServerDiedError if no server is left, or a server died and restarts are off."""
        if self._watch is None:
            self._servers.check()
        else:
            self._report_events(self._watch)
            self._watch.check()

    @property
    def num_restarts(self) -> int:
        """Number of successful restarts."""
        return self._num_restarts

    def _report_until_closed(self) -> None:
        """Reports events while the loop waits for a restarting server."""
        assert self._watch is not None
        while not self._closing.wait(0.5):
            self._report_events(self._watch)

    def _report_events(self, watch: ServerWatch) -> None:
        with self._reporting:
            events = list(watch.events)
            for event in events[self._num_reported :]:
                self._report(f"rollout server {event.server} {event.what.replace('_', ' ')}: {event.detail}")
            self._num_reported = len(events)

    def _push_to_serving(self, version: int) -> SyncReport | None:
        while serving := self._serving():
            try:
                if serving != self._connected:
                    self._connect([self._servers.endpoints[index] for index in serving])
                    self._connected = serving
                report: SyncReport = self._actor.push_weights(version)
                return report
            except RankError as error:
                self._connected = []
                if self._watch is None:
                    raise
                if self._has_died(serving):
                    continue
                if not _restart_may_help(error):
                    raise
                # Two attempts failed, and the servers are still paused. The watch restarts them and pushes the weights.
                self._report(f"rollout servers {serving} are restarted, the weights did not arrive: {error}")
                for index in serving:
                    self._watch.restart(index)
        return None

    def _bring_up_to_date(self, index: int, endpoint: Endpoint) -> int:
        """Called by the watch: pushes the current weights to a restarted server."""
        with self._weights:
            if self._closing.is_set():
                raise RlRuntimeError("the run is over")
            version = self._client.policy_version
            self._connected = []
            failures = self._num_failures()[index]
            self._connect([endpoint])
            self._actor.push_weights(version)
            self._failures_recovered[index] = failures
            self._num_restarts += 1
            return version

    def _connect(self, endpoints: list[Endpoint]) -> None:
        self._actor.connect_servers(endpoints, self._sync, self._adapter)

    def _serving(self) -> list[int]:
        """The servers that run and have the current weights."""
        if self._watch is None:
            return list(range(len(self._servers.endpoints)))
        failures = self._num_failures()
        return [
            index
            for index, server in enumerate(self._servers.servers)
            if server.alive and failures[index] == self._failures_recovered[index]
        ]

    def _num_failures(self) -> list[int]:
        """How many times each server died or hung."""
        failures = [0] * len(self._servers.servers)
        for event in list(self._watch.events) if self._watch is not None else ():
            failures[event.server] += event.what in ("died", "hung")
        return failures

    def _has_died(self, serving: list[int]) -> bool:
        """Whether one of these servers has died; waits for the supervisor to notice it."""
        deadline = time.monotonic() + _NOTICE_S
        while self._serving() == serving:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def _restart_may_help(error: RankError) -> bool:
    """Whether a sync failed in transit, and not because of a plan that every server refuses."""
    cause = error.cause
    return isinstance(cause, WeightSyncError) and (not isinstance(cause, ReceiverError) or cause.retryable)
