"""Monitors servers and restarts those that die or hang. The only place where servers are restarted."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from plinth_base import Endpoint
from plinth_base.endpoint import NO_ANSWER, call

from ..client.balanced import BalancedClient
from ..errors import RolloutConfigError, ServerDiedError, ServerLostError, ServerStartError
from .group import ServerGroup
from .process import Server

OnRestart = Callable[[int, Endpoint], int | None]
EventKind = Literal["died", "hung", "restarted", "given_up"]
_POLL_S = 0.1
_HEALTH_EVERY_S = 10.0
_HANG_TIMEOUT_S = 60.0
"""A server that does not answer for so long has hung."""


@dataclass(frozen=True)
class WatchEvent:
    """An event in the life of a server. given_up: it is not restarted again."""

    server: int
    kind: EventKind
    detail: str
    at_s: float  # time.monotonic()


class ServerWatch:
    """Monitors the servers of a group for a client (`RolloutClient`, `TokenScorer`), with one thread per server.

    on_restart(index, endpoint): called when a restarted server is ready but receives no requests yet. At that time it
    holds the weights of the model folder and no LoRA adapter: push the current weights to this endpoint and return
    their policy version. If the function raises, or returns another version than the client's, the server is given up,
    so that it never generates with wrong weights.

    A server that the client cannot reach receives no requests until the watch has checked it. A server that fails
    again, including during its start, is restarted up to max_restarts times and then given up. When all servers are
    given up, waiting requests end as failures.

    restarting: entered with the server's number around each restart, from its start to the end of on_restart; it may
    wait until there is GPU memory for a server.

    Raises RolloutConfigError: the group has no servers of its own, or the client has other endpoints.
    """

    def __init__(
        self,
        group: ServerGroup,
        client: BalancedClient,
        *,
        on_restart: OnRestart,
        max_restarts: int = 3,
        restarting: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if not group.servers:
            raise RolloutConfigError("existing servers, given by url, cannot be restarted", field="group")
        if tuple(e.url for e in client.endpoints) != tuple(e.url for e in group.endpoints):
            raise RolloutConfigError(field="client", allowed="a client of this group's endpoints, in the same order")
        self.events: list[WatchEvent] = []
        self._group, self._client, self._on_restart = group, client, on_restart
        self._max_restarts, self._restart_context = max_restarts, restarting
        self._stopping = threading.Event()
        self._suspects = [threading.Event() for _ in group.servers]
        self._restarting = [False] * len(group.servers)
        self._threads = [
            threading.Thread(target=self._run, args=(index, server), name=f"watch-{index}", daemon=True)
            for index, server in enumerate(group.servers)  # positions in the group, as in the client
        ]

    def start(self) -> "ServerWatch":
        """Starts to monitor; entering the watch as a context manager calls it."""
        self._client.report_suspects_to(self._suspect)
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, *, abort_restarts: bool = False) -> None:
        """Stop monitoring; the servers keep running. Idempotent.

        abort_restarts: also stop servers that are restarting, instead of waiting for their restart.
        """
        self._stopping.set()
        self._client.report_suspects_to(lambda _: None)
        end = time.monotonic() + _HANG_TIMEOUT_S + 10.0
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < end:
            for index, server in enumerate(self._group.servers if abort_restarts else ()):
                if self._restarting[index] and server.alive:
                    server.stop()
            time.sleep(_POLL_S)

    def restart(self, server: int) -> None:
        """Stop server number `server`. The watch then restarts it in the background, like a server that died."""
        self._group.servers[server].stop()

    def __enter__(self) -> "ServerWatch":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raises ServerDiedError if all servers were given up."""
        given_up = [event for event in self.events if event.kind == "given_up"]
        if len(given_up) == len(self._group.servers):
            last = given_up[-1]
            raise ServerDiedError(last.detail, last.server, self._group.servers[last.server].log_path)

    # ---- the thread of one server --------------------------------------------------------------------------------
    def _suspect(self, server: int) -> None:
        """The client could not reach the server: block it until the watch has checked it."""
        self._client.dispatcher.block(server)
        self._suspects[server].set()

    def _run(self, index: int, server: Server) -> None:
        try:
            self._watch(index, server)
        except Exception as error:  # without its thread, a blocked server would stay blocked and requests would wait
            self._give_up(index, f"the watch failed: {type(error).__name__}: {error}")

    def _watch(self, index: int, server: Server) -> None:
        restarts, next_health = 0, time.monotonic() + _HEALTH_EVERY_S
        suspect = self._suspects[index]
        while not self._stopping.wait(_POLL_S):
            suspected = suspect.is_set()
            if server.alive and not suspected and time.monotonic() < next_health:
                continue
            suspect.clear()
            if self._healthy(server):
                if suspected:
                    self._client.dispatcher.unblock(index)
                next_health = time.monotonic() + _HEALTH_EVERY_S
                continue
            if self._stopping.is_set():
                return
            restarts += 1
            self._restarting[index] = True
            try:
                if not self._try_restart(index, server, restarts):
                    return
            finally:
                self._restarting[index] = False
            next_health = time.monotonic() + _HEALTH_EVERY_S

    def _healthy(self, server: Server) -> bool:
        """False if the server has exited or has not answered for a minute."""
        end = time.monotonic() + _HANG_TIMEOUT_S
        while server.alive and not self._stopping.is_set():
            left = end - time.monotonic()
            if left <= 0:
                return False
            try:
                status, _ = call(server.endpoint, "GET", "/health", timeout_s=left)
            except NO_ANSWER:
                # Connection refused: the front end has exited and its supervisor is cleaning up, or it is only busy.
                self._stopping.wait(_POLL_S)
                continue
            return status == 200
        return False

    def _try_restart(self, index: int, server: Server, restarts: int) -> bool:
        """False: the server is given up. True: it is back, or failed again before it was ready."""
        self._client.dispatcher.block(index)
        hung = server.alive
        self._note(index, "hung" if hung else "died", server.reason())
        if restarts > self._max_restarts:
            return self._give_up(index, f"it failed {restarts} times, max_restarts={self._max_restarts}")
        server.stop()
        try:
            with self._restart_context(index):
                server.start()
                server.wait_ready(time.monotonic() + self._group.startup_timeout_s)
                version = self._on_restart(index, server.endpoint)
        except ServerLostError as error:
            return self._give_up(index, str(error))
        except Exception as error:
            if isinstance(error, ServerStartError) or not self._healthy(server):
                server.stop()  # it failed before it was ready, which counts as the next failure
                return True
            return self._give_up(index, f"on_restart failed: {type(error).__name__}: {error}")
        expected = self._client.policy_version
        if problem := version_problem(version, expected):
            return self._give_up(index, problem)
        self._suspects[index].clear()
        self._note(index, "restarted", f"policy version {expected}")
        self._client.dispatcher.unblock(index)
        return True

    def _give_up(self, index: int, detail: str) -> bool:
        self._note(index, "given_up", detail)
        self._client.dispatcher.retire(index)
        return False

    def _note(self, server: int, kind: EventKind, detail: str) -> None:
        self.events.append(WatchEvent(server, kind, detail, time.monotonic()))


def version_problem(returned: int | None, expected: int) -> str | None:
    """Reason why a server that on_restart brought to version `returned` must not generate; None: it may."""
    if returned is None or returned == expected:
        return None
    return f"on_restart returned version {returned}, the client is at version {expected}"
