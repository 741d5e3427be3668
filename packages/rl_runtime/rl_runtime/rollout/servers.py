"""The rollout servers as the loop sees them: all that serve hold the current weights, and one that dies comes back.

Weights move under a lock. The loop holds it while they change (`changing_weights`: updates, sync, checkpoint); a server
that was started again waits for it and is brought up to date while the loop generates, when all ranks are idle and the
weights are those of the published version. So the ranks never see two pushes, or a push within an update.
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
"""How long a server's supervisor may take to see that the server is gone."""
_ADAPTER = "policy-adapter"
"""The model name of the actor's adapters on the servers, whose own name is the base model's."""


class RolloutServers:
    """Pushes the weights of `actor` into the servers; starts each of them again up to `max_restarts` times.

    To be used as a context once the servers are ready. `report` gets a line for whatever happens to a server.
    `adapters_alone`: servers keep the base model, and the actor's LoRA adapters are what is pushed and asked for.
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
        self._failures_mended = [0] * len(servers.endpoints)
        self._num_restarts = 0
        self._num_reported = 0
        self._telling = threading.Lock()
        self._closing = threading.Event()
        self._watch: ServerWatch | None = None
        if servers.servers and max_restarts:
            self._watch = ServerWatch(servers, client, on_restart=self._bring_up_to_date, max_restarts=max_restarts)

    def __enter__(self) -> "RolloutServers":
        if self._watch is not None:
            self._watch.start()
            threading.Thread(target=self._tell_until_closed, name="tell-of-servers", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._watch is None:
            return
        self._watch.stop(abort_restarts=True)

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Inside, the weights are the caller's to change, and to push."""
        with self._weights:
            yield

    def push(self, version: int) -> SyncReport | None:
        """The actor's weights into every server that is up, as policy `version`; None when none is up.

        The others get them before they serve again. Servers that the weights do not reach are started again.
        """
        with self._weights:
            report = self._push_to_serving(version)
            self._client.set_policy_version(version)
            return report

    def check(self) -> None:
        """Raises rollout_vllm.ServerDiedError: no server is left, or one died that is not to be started again."""
        if self._watch is None:
            self._servers.check()
        else:
            self._tell(self._watch)
            self._watch.check()

    @property
    def num_restarts(self) -> int:
        """Restarts that brought a server back."""
        return self._num_restarts

    def _tell_until_closed(self) -> None:
        """While a server is started again the loop may wait for it: the user is told meanwhile."""
        assert self._watch is not None
        while not self._closing.wait(0.5):
            self._tell(self._watch)

    def _tell(self, watch: ServerWatch) -> None:
        with self._telling:
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
                if self._changes(serving):
                    continue
                if not _a_fresh_server_may_help(error):
                    raise
                # Sent twice in vain: they stay paused. The watch starts them anew and brings them up to date.
                self._report(f"rollout servers {serving} are started again, the weights did not arrive: {error}")
                for index in serving:
                    self._watch.restart(index)
        return None

    def _bring_up_to_date(self, index: int, endpoint: Endpoint) -> int:
        """The watch's hook: the current weights for a server that was started again."""
        with self._weights:
            if self._closing.is_set():
                raise RlRuntimeError("the run is over")
            version = self._client.policy_version
            self._connected = []
            failures = self._num_failures()[index]
            self._connect([endpoint])
            self._actor.push_weights(version)
            self._failures_mended[index] = failures
            self._num_restarts += 1
            return version

    def _connect(self, endpoints: list[Endpoint]) -> None:
        self._actor.connect_servers(endpoints, self._sync, self._adapter)

    def _serving(self) -> list[int]:
        """The servers that run and have missed no push."""
        if self._watch is None:
            return list(range(len(self._servers.endpoints)))
        failures = self._num_failures()
        return [
            index
            for index, server in enumerate(self._servers.servers)
            if server.alive and failures[index] == self._failures_mended[index]
        ]

    def _num_failures(self) -> list[int]:
        """How often each server died or hung."""
        failures = [0] * len(self._servers.servers)
        for event in list(self._watch.events) if self._watch is not None else ():
            failures[event.server] += event.what in ("died", "hung")
        return failures

    def _changes(self, serving: list[int]) -> bool:
        """Whether one of these turns out to be gone: a moment passes before that is known."""
        deadline = time.monotonic() + _NOTICE_S
        while self._serving() == serving:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def _a_fresh_server_may_help(error: RankError) -> bool:
    """Whether a sync failed on its way, and not for a plan that every server would refuse."""
    cause = error.cause
    return isinstance(cause, WeightSyncError) and (not isinstance(cause, ReceiverError) or cause.retryable)
