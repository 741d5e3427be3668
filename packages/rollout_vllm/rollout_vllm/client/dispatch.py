"""Load balancing of requests over servers: the routing state, and a queue of requests that wait for capacity."""

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection

_MAX_REMEMBERED_GROUPS = 65536
_COOLDOWN_S, _MAX_COOLDOWN_S = 1.0, 30.0


class Dispatcher:
    """Chooses a server for each request, least loaded and with affinity; requests without one wait, first in first out.

    Counts the samples in flight of every server in `load`. Thread-safe; shared by several event loops.
    """

    def __init__(self, num_servers: int, *, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.load = [0] * num_servers
        self.blocked = [False] * num_servers
        self._retired = [False] * num_servers
        self._down_until = [0.0] * num_servers
        self._consecutive_failures = [0] * num_servers
        self._affinity: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.RLock()
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._called = 0  # waiters that have left the queue for their turn and have not taken it yet: one at most
        self._paused = False

    def pick(self, group: str, cost: int, now: float, *, avoid: Collection[int] = ()) -> int | None:
        """Choose a server for `cost` samples of `group` and count them as in flight. None: no server has capacity.

        now: seconds of a monotonic clock. avoid: servers that just failed for this group; used only if no other server
        is available. An idle server accepts a group that is larger than its limit, so that such a group does not wait
        indefinitely.
        """
        with self._lock:
            allowed = [s for s in range(len(self.load)) if not self.blocked[s]]
            # With all servers in cooldown, probe the one whose cooldown ends first.
            first = sorted(allowed, key=lambda s: self._down_until[s])[:1]
            healthy = [s for s in allowed if self._down_until[s] <= now] or first
            preferred = [s for s in healthy if s not in avoid] or healthy
            fits = [s for s in preferred if self.load[s] == 0 or self.load[s] + cost <= self.max_in_flight]
            if not fits:
                return None
            least = min(self.load[s] for s in fits)
            previous = self._affinity.get(group)
            # The previous server has the prompt in its prefix cache, which is worth a queue longer by one group.
            reuse = previous in fits and self.load[previous] <= least + cost
            choice = previous if reuse else min(fits, key=lambda s: (self.load[s], s))
            assert choice is not None
            self.load[choice] += cost
            self._affinity[group] = choice
            self._affinity.move_to_end(group)
            while len(self._affinity) > _MAX_REMEMBERED_GROUPS:
                self._affinity.popitem(last=False)
            return choice

    async def acquire(self, group: str, cost: int, avoid: Collection[int] = ()) -> int | None:
        """Wait for a server with capacity for `cost` samples, held until `release`. None: all servers are retired."""
        loop = asyncio.get_running_loop()
        its_turn = False
        while True:
            with self._lock:
                self._called -= its_turn
                if all(self._retired):
                    return None
                server = None
                if not self._paused and (its_turn or not self._is_queued()):
                    server = self.pick(group, cost, time.monotonic(), avoid=avoid)
                if server is None:
                    waiter: asyncio.Future[None] = loop.create_future()
                    (self._waiters.appendleft if its_turn else self._waiters.append)((loop, waiter))
            if server is not None:
                self._wake_one()  # there may be capacity for the next one
                return server
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._pass_on()
                raise
            its_turn = True

    def release(self, server: int, cost: int) -> None:
        """The samples counted by `acquire` or `pick` are no longer in flight."""
        with self._lock:
            self.load[server] -= cost
            assert self.load[server] >= 0, "release() without acquire()"
        self._wake_one()

    def succeeded(self, server: int) -> None:
        with self._lock:
            self._consecutive_failures[server] = 0
            self._down_until[server] = 0.0

    def failed(self, server: int, now: float) -> None:
        """Start a cooldown of the server; it doubles with each consecutive failure."""
        with self._lock:
            doublings = min(self._consecutive_failures[server], 20)
            self._consecutive_failures[server] += 1
            self._down_until[server] = now + min(_MAX_COOLDOWN_S, _COOLDOWN_S * 2.0**doublings)

    def pause(self) -> None:
        """Make all requests wait until `resume`."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
        self._wake_one()

    def block(self, server: int) -> None:
        """Exclude the server until `unblock`, while it restarts or waits for weights."""
        with self._lock:
            self.blocked[server] = True

    def unblock(self, server: int) -> None:
        with self._lock:
            self.blocked[server] = self._retired[server]
            self.succeeded(server)
        self._wake_one()

    def retire(self, server: int) -> None:
        """Exclude the server permanently."""
        with self._lock:
            self.blocked[server] = self._retired[server] = True
            num_waiting = len(self._waiters) if all(self._retired) else 0
        for _ in range(num_waiting):
            self._wake_one()

    @property
    def samples_in_flight(self) -> int:
        return sum(self.load)

    def _wake_one(self) -> None:
        with self._lock:
            if (self._paused or self._called) and not all(self._retired):
                return  # waiting requests keep their order; the one that was called wakes the next
            while self._waiters:
                loop, waiter = self._waiters.popleft()
                if not waiter.done() and not loop.is_closed():
                    self._called += 1
                    loop.call_soon_threadsafe(self._call, waiter)
                    return

    def _call(self, waiter: asyncio.Future[None]) -> None:
        if waiter.done():  # cancelled meanwhile
            self._pass_on()
        else:
            waiter.set_result(None)

    def _pass_on(self) -> None:
        """A waiter that was called does not take its turn."""
        with self._lock:
            self._called -= 1
        self._wake_one()

    def _is_queued(self) -> bool:
        """True if a new request has others before it."""
        return bool(self._called) or any(not waiter.done() for _, waiter in self._waiters)
