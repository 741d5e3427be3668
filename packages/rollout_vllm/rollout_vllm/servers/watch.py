"""Keeps servers alive: restarts one that died or hangs, has it synchronised, and only then gives it traffic."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..client.client import RolloutClient
from ..errors import RolloutConfigError, ServerDiedError, ServerStartError
from ..samples import Endpoint
from .process import Server, call
from .server import ServerGroup

OnRestart = Callable[[int, Endpoint], int | None]
_POLL_S = 0.1


@dataclass(frozen=True)
class WatchEvent:
    """What happened to a server. `what`: died or hung; restarted: it serves again; given_up: it will not come back."""

    server: int
    what: Literal["died", "hung", "restarted", "given_up"]
    detail: str
    at_s: float  # time.monotonic()


class ServerWatch:
    """Watches a group for a client, one thread a server.

    on_restart(index, endpoint): called when a restarted server answers but has no traffic yet. It holds the weights of
    the model folder then, and no LoRA adapter: push the current ones to this endpoint and return their version. If it
    raises, or returns another version than the client's, the server is given up: wrong weights must not generate.

    A server that the client could not reach gets no traffic until the watch has looked at it. One that fails again,
    also while it starts, is restarted up to max_restarts times, then given up; when all are, waiting requests come back
    as failures.

    health_every_s: pause between health calls; hang_timeout_s: without an answer for so long, a server counts as hung.
    """

    def __init__(
        self,
        group: ServerGroup,
        client: RolloutClient,
        *,
        on_restart: OnRestart,
        max_restarts: int = 3,
        health_every_s: float = 10.0,
        hang_timeout_s: float = 60.0,
    ) -> None:
        if not group.servers:
            raise RolloutConfigError("the servers given by url are not ours to restart")
        if tuple(e.url for e in client.endpoints) != tuple(e.url for e in group.endpoints):
            raise RolloutConfigError("the client must have been made with this group's endpoints, in their order")
        self.events: list[WatchEvent] = []
        self._group, self._client, self._on_restart = group, client, on_restart
        self._max_restarts = max_restarts
        self._health_every_s, self._hang_timeout_s = health_every_s, hang_timeout_s
        self._stopping = threading.Event()
        self._suspects = [threading.Event() for _ in group.servers]
        self._threads = [
            threading.Thread(target=self._run, args=(index, server), name=f"watch-{index}", daemon=True)
            for index, server in enumerate(group.servers)  # positions in the group, as the client counts them
        ]

    def start(self) -> ServerWatch:
        self._client.report_suspects_to(self._suspect)
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Stop watching (the servers run on). Idempotent."""
        self._stopping.set()
        self._client.report_suspects_to(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=self._hang_timeout_s + 10.0)

    def __enter__(self) -> ServerWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raises ServerDiedError if every server was given up."""
        given_up = [event for event in self.events if event.what == "given_up"]
        if len(given_up) == len(self._group.servers):
            last = given_up[-1]
            raise ServerDiedError(last.detail, last.server, self._group.servers[last.server].log_path)

    # ---- one server's thread -------------------------------------------------------------------------------------
    def _suspect(self, server: int) -> None:
        """The client could not reach it: no traffic until we have looked."""
        self._client.block(server)
        self._suspects[server].set()

    def _run(self, index: int, server: Server) -> None:
        try:
            self._watch(index, server)
        except Exception as error:  # without its watch a blocked server would stay blocked, and its requests wait
            self._give_up(index, f"the watch failed: {type(error).__name__}: {error}")

    def _watch(self, index: int, server: Server) -> None:
        restarts, next_health = 0, time.monotonic() + self._health_every_s
        suspect = self._suspects[index]
        while not self._stopping.wait(_POLL_S):
            suspected = suspect.is_set()
            if server.alive and not suspected and time.monotonic() < next_health:
                continue
            suspect.clear()
            if self._healthy(server):
                if suspected:
                    self._client.unblock(index)
                next_health = time.monotonic() + self._health_every_s
                continue
            if self._stopping.is_set():
                return
            restarts += 1
            if not self._revive(index, server, restarts):
                return
            next_health = time.monotonic() + self._health_every_s

    def _healthy(self, server: Server) -> bool:
        """False once it has exited or not answered for hang_timeout_s."""
        end = time.monotonic() + self._hang_timeout_s
        while server.alive and not self._stopping.is_set():
            left = end - time.monotonic()
            if left <= 0:
                return False
            try:
                status, _ = call(server.endpoint, "GET", "/health", timeout_s=left)
            except (OSError, http.client.HTTPException):
                # Refused: the front end is gone and its supervisor is clearing up, or it is only just busy.
                self._stopping.wait(_POLL_S)
                continue
            return status == 200
        return False

    def _revive(self, index: int, server: Server, restarts: int) -> bool:
        self._client.block(index)
        hung = server.alive
        self._note(index, "hung" if hung else "died", server.reason())
        if restarts > self._max_restarts:
            return self._give_up(index, f"it failed {restarts} times, max_restarts={self._max_restarts}")
        server.stop()
        try:
            server.start()
            server.wait_ready(time.monotonic() + self._group.startup_timeout_s)
            version = self._on_restart(index, server.endpoint)
        except Exception as error:
            if isinstance(error, ServerStartError) or not self._healthy(server):
                server.stop()  # it failed again before it served: the next failure
                return True
            return self._give_up(index, f"on_restart failed: {type(error).__name__}: {error}")
        expected = self._client.policy_version
        if problem := version_problem(version, expected):
            return self._give_up(index, problem)
        self._suspects[index].clear()
        self._note(index, "restarted", f"policy version {expected}")
        self._client.unblock(index)
        return True

    def _give_up(self, index: int, detail: str) -> bool:
        self._note(index, "given_up", detail)
        self._client.retire(index)
        return False

    def _note(self, server: int, what: Literal["died", "hung", "restarted", "given_up"], detail: str) -> None:
        self.events.append(WatchEvent(server, what, detail, time.monotonic()))


def version_problem(brought: int | None, expected: int) -> str | None:
    """Why a server that was synchronised to version `brought` may not serve; None: it may."""
    if brought is None or brought == expected:
        return None
    return f"on_restart brought version {brought}, the client is at {expected}"
