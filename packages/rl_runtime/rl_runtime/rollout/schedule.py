"""Bounded staleness: which groups are generated ahead of the trainer, and which of them a step trains on. Pure state.

Step t starts from policy version t - 1 and makes version t. A sample's staleness at step t is t - 1 minus the oldest
version that sampled one of its tokens; it is at most `max_staleness`. The groups of step s may therefore start as soon
as the servers hold version s - 1 - `max_staleness`.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A group that was drawn and not trained on yet."""

    number: int
    """Order in which groups were drawn, from 0; it never repeats in a run."""
    step: int
    """The first step that may train on it."""
    version: int
    """No token of it is of an older policy version; once it has ended, exactly its oldest version."""
    has_ended: bool = False
    """True if all its samples are generated and scored, or have failed."""


class Schedule:
    """The groups between drawing and training.

    A step trains on `batch_size` of the groups that were drawn for it or for earlier steps. With `extra_groups` it does
    not wait for that many groups; they stay for the next step, and one of the `max_staleness` versions is kept for
    that, so the servers work one step less ahead. A step waits for the groups that would be too old for the next one.

    Args:
        replaces: groups are replaced when their scores turn out to teach nothing (`replacements`). A step is then ready
            when all groups that were drawn for it have ended, and takes them all; no `extra_groups`.
    """

    def __init__(
        self, *, batch_size: int, max_staleness: int, last_step: int, extra_groups: int = 0, replaces: bool = False
    ) -> None:
        assert not (replaces and extra_groups), "a step would not take all of its groups"
        self.batch_size, self.extra_groups, self.max_staleness = batch_size, extra_groups, max_staleness
        self._last_step, self._replaces = last_step, replaces
        self._num_ahead = max_staleness - bool(extra_groups)
        self._version = 0
        self._drawn_for = 0
        self._next_number = 0
        self._tickets: dict[int, Ticket] = {}

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """All groups between drawing and training, in the order in which they were drawn."""
        return tuple(self._tickets.values())

    def publish(self, version: int) -> None:
        """The servers hold the weights of this version from now on."""
        assert version >= self._version, "versions only grow"
        self._version = version
        self._drawn_for = max(self._drawn_for, version)

    def due(self) -> list[tuple[int, int]]:
        """(step, number of groups) to be drawn now, in order."""
        until = min(self._last_step, self._version + 1 + self._num_ahead)
        extra = self.extra_groups if not self._next_number else 0
        steps = range(self._drawn_for + 1, until + 1)
        return [(step, self.batch_size + (extra if step == steps[0] else 0)) for step in steps]

    def draw(self, step: int, num_groups: int) -> list[Ticket]:
        """New groups for `step`, whose first tokens will be of the version on the servers, or of a later one."""
        first = self._next_number
        new = [Ticket(number=first + i, step=step, version=self._version) for i in range(num_groups)]
        self._tickets |= {ticket.number: ticket for ticket in new}
        self._next_number += num_groups
        self._drawn_for = max(self._drawn_for, step)
        return new

    def end(self, number: int, version: int | None) -> None:
        """The group has ended; `version` is the oldest of its tokens, None without any."""
        ticket = self._tickets[number]
        version = ticket.version if version is None else version
        assert version >= ticket.version, "a token is older than its group"
        self._tickets[number] = replace(ticket, version=version, has_ended=True)

    def renew(self, number: int) -> None:
        """The group has no tokens and starts now, with the version on the servers."""
        self._tickets[number] = replace(self._tickets[number], version=self._version)

    def replacements(self, useless: Collection[int], *, at_most: int) -> list[tuple[int, int]]:
        """(step, number of groups) to be drawn now in place of finished groups that have no gradient.

        Args:
            useless: the numbers of all such groups; they stay until their step takes them.
            at_most: replacements of a step, including earlier ones.
        """
        drawn = Counter(ticket.step for ticket in self._tickets.values())
        wanted = Counter(self._tickets[number].step for number in useless)
        missing = {step: min(count, at_most) - (drawn[step] - self.batch_size) for step, count in wanted.items()}
        return [(step, count) for step, count in sorted(missing.items()) if count > 0]

    def is_ready(self, step: int) -> bool:
        """True if the groups of `step` have ended."""
        window = self._window(step)
        ended = sum(ticket.has_ended for ticket in window)
        if self._replaces:
            return ended == len(window) >= self.batch_size
        return ended >= self.batch_size and all(ticket.has_ended for ticket in self.awaited(step))

    def awaited(self, step: int) -> list[Ticket]:
        """The groups that `step` has to wait for, because they would be too old for the next one."""
        return [t for t in self._window(step) if self._staleness(t, step) >= self.max_staleness]

    def take(self, step: int) -> list[Ticket]:
        """Removes and returns the groups that `step` trains on, in the order in which they were drawn.

        These are `batch_size`, except with `replaces`: those that would be too old for the next step, and the first
        ones that were drawn.
        """
        assert self.is_ready(step)
        ended = [ticket for ticket in self._window(step) if ticket.has_ended]
        oldest_first = sorted(ended, key=lambda ticket: (ticket.version, ticket.number))
        count = len(ended) if self._replaces else self.batch_size
        taken = sorted(oldest_first[:count], key=lambda ticket: ticket.number)
        for ticket in taken:
            assert self._staleness(ticket, step) <= self.max_staleness
            del self._tickets[ticket.number]
        return taken

    def _window(self, step: int) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.step <= step]

    @staticmethod
    def _staleness(ticket: Ticket, step: int) -> int:
        return step - 1 - ticket.version

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "batch_size": self.batch_size,
            "drawn_for": self._drawn_for,
            "next_number": self._next_number,
            "tickets": [asdict(ticket) for ticket in self.tickets],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, has_ended: Sequence[int]) -> None:
        """Restores the result of `state_dict`; of the groups only those in `has_ended` have their scores."""
        self._drawn_for, self._next_number = state["drawn_for"], state["next_number"]
        tickets = [Ticket(**saved) for saved in state["tickets"]]
        self._tickets = {t.number: replace(t, has_ended=t.number in has_ended) for t in tickets}
