"""Restarts the servers of a run that die or hang, and reports each event in one line: rollout servers and teachers."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from rollout_vllm import Endpoint, ServerGroup, ServerWatch
from rollout_vllm.client.balanced import BalancedClient

OnRestart = Callable[[int, Endpoint], int | None]


class WatchedServers:
    """A `ServerWatch` with a thread that reports its events; ends both when it is closed.

    Args:
        kind: what the servers are in a report, such as "rollout server".
        max_restarts: restarts of each server.
        report: called with one line of text for each event of a server.
        on_restart: gives a restarted server its weights (`ServerWatch`); default: it keeps those of its folder.
        restarting: entered around each restart.
    """

    def __init__(
        self,
        servers: ServerGroup,
        client: BalancedClient,
        *,
        kind: str,
        max_restarts: int,
        report: Callable[[str], None],
        on_restart: OnRestart = lambda *_: None,
        restarting: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.watch = ServerWatch(
            servers, client, on_restart=on_restart, max_restarts=max_restarts, restarting=restarting
        )
        self._kind, self._report = kind, report
        self._num_reported = 0
        self._reporting = threading.Lock()
        self._closing = threading.Event()

    def start(self) -> None:
        """Starts to watch; the servers must be ready."""
        self.watch.start()
        threading.Thread(target=self._report_until_closed, name="report-server-events", daemon=True).start()

    def close(self) -> None:
        """Stops watching, and servers that are restarting."""
        self._closing.set()
        self.watch.stop(abort_restarts=True)

    def check(self) -> None:
        """Reports what has happened; raises rollout_vllm.ServerDiedError if no server is left."""
        self._report_events()
        self.watch.check()

    def _report_until_closed(self) -> None:
        """Reports events in the background, also while the training loop waits for a restart."""
        while not self._closing.wait(0.5):
            with suppress(Exception):  # `check` reports the same events again, and raises
                self._report_events()

    def _report_events(self) -> None:
        with self._reporting:
            for event in list(self.watch.events)[self._num_reported :]:
                self._report(f"{self._kind} {event.server} {event.kind.replace('_', ' ')}: {event.detail}")
                self._num_reported += 1
