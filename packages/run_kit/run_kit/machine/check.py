"""One line of `plinth doctor`: the finding, whether a run works with it, and what to change if not."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One finding. Only a problem prevents a run."""

    subject: str
    finding: str
    state: State = "ok"
    remedy: str = ""
    """The change that is needed, in one line; empty if the state is ok."""

    def __str__(self) -> str:
        remedy = f"\n{'':<29}-> {self.remedy}" if self.remedy else ""
        return f"  {self.state:<8}{self.subject:<19}{self.finding}{remedy}"


def at_least(subject: str, finding: str, value: float, *, warn: float, refuse: float, remedy: str) -> Check:
    """A check of an amount: a problem below `refuse`, a warning below `warn`."""
    state: State = "problem" if value < refuse else "warning" if value < warn else "ok"
    return Check(subject, finding, state, remedy if state != "ok" else "")
