"""One line of `plinth doctor`: what was found, whether a run works with it, and what to change if not."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. Only a problem prevents a run."""

    subject: str
    found: str
    state: State = "ok"
    remedy: str = ""
    """What to change, in one line; empty if the state is ok."""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.state != "ok"), self


def at_least(subject: str, found: str, value: float, *, warn: float, refuse: float, remedy: str) -> Check:
    """A check of an amount: a problem below `refuse`, a warning below `warn`."""
    state: State = "problem" if value < refuse else "warning" if value < warn else "ok"
    return Check(subject=subject, found=found, state=state, remedy=remedy if state != "ok" else "")


def to_text(title: str, checks: Iterable[Check]) -> str:
    """A table of one line per check, with its remedy below it."""
    lines = [title]
    for check in checks:
        lines.append(f"  {check.state:<8}{check.subject:<19}{check.found}")
        if check.remedy:
            lines.append(f"{'':<29}-> {check.remedy}")
    return "\n".join(lines) + "\n"
