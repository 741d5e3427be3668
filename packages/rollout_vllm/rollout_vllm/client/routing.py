"""Which server takes a group: least loaded, with affinity, without those that are down. Pure state, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

_MAX_REMEMBERED_GROUPS = 65536


class Router:
    """Counts samples in flight per server and picks the next one.

    Every call takes the time as an argument (seconds of a monotonic clock), so that tests need no clock.
    """

    def __init__(self, num_servers: int, *, max_in_flight: int, cooldown_s: float = 1.0, max_cooldown_s: float = 30.0):
        if num_servers < 1:
            raise ValueError(f"num_servers={num_servers}: allowed is 1 or more")
        self.num_servers = num_servers
        self.max_in_flight = max_in_flight
        self.load = [0] * num_servers
        self._blocked = [False] * num_servers
        self._retired = [False] * num_servers
        self._down_until = [0.0] * num_servers
        self._strikes = [0] * num_servers
        self._cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._affinity: OrderedDict[str, int] = OrderedDict()

    def pick(self, group: str, cost: int, now: float, *, avoid: Collection[int] = ()) -> int | None:
        """The server for `cost` samples of `group`, counted as in flight from now on; None: wait.

        avoid: servers that just failed this group; taken only if nobody else may serve. A server takes a group larger
        than its limit when it is idle, so that no group waits for ever.
        """
        allowed = [s for s in range(self.num_servers) if not self._blocked[s]]
        healthy = [s for s in allowed if self._down_until[s] <= now] or self._longest_rested(allowed)
        preferred = [s for s in healthy if s not in avoid] or healthy
        fits = [s for s in preferred if self.load[s] == 0 or self.load[s] + cost <= self.max_in_flight]
        if not fits:
            return None
        least = min(self.load[s] for s in fits)
        home = self._affinity.get(group)
        # Staying home saves the prompt's prefill; a queue longer by more than one group costs more than that.
        choice = home if home in fits and self.load[home] <= least + cost else self._least_loaded(fits)
        self.load[choice] += cost
        self._remember(group, choice)
        return choice

    def _longest_rested(self, allowed: list[int]) -> list[int]:
        """All are down: probe the one whose rest ends first."""
        return [min(allowed, key=lambda s: self._down_until[s])] if allowed else []

    def _least_loaded(self, servers: list[int]) -> int:
        return min(servers, key=lambda s: (self.load[s], s))

    def _remember(self, group: str, server: int) -> None:
        self._affinity[group] = server
        self._affinity.move_to_end(group)
        while len(self._affinity) > _MAX_REMEMBERED_GROUPS:
            self._affinity.popitem(last=False)

    def finish(self, server: int, cost: int) -> None:
        """The samples counted by `pick` are no longer in flight."""
        self.load[server] -= cost
        assert self.load[server] >= 0, "finish() without pick()"

    def succeeded(self, server: int) -> None:
        self._strikes[server] = 0
        self._down_until[server] = 0.0

    def failed(self, server: int, now: float) -> None:
        """The server is at fault: rest it, longer each time in a row."""
        rest = min(self._max_cooldown_s, self._cooldown_s * 2.0 ** min(self._strikes[server], 20))
        self._strikes[server] += 1
        self._down_until[server] = now + rest

    def block(self, server: int) -> None:
        """Take the server out of service until `unblock` (it is being restarted or synchronised)."""
        self._blocked[server] = True

    def unblock(self, server: int) -> None:
        self._blocked[server] = self._retired[server]
        self.succeeded(server)

    def retire(self, server: int) -> None:
        """Out of service for good."""
        self._blocked[server] = self._retired[server] = True

    @property
    def all_retired(self) -> bool:
        return all(self._retired)

    def is_blocked(self, server: int) -> bool:
        return self._blocked[server]
