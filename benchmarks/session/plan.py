"""Measurements of a session and the order of their starts. Pure, but for reading plans and looking for packages."""

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

PLANS = Path(__file__).with_name("plans")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A command that prints a table."""

    name: str
    command: str
    """`WORK` in it is the folder of models and runs, which the measurements of a plan share."""
    gpus: int
    seconds: float
    """Expected; it starts only if so much time is left."""
    limit: float
    """Seconds after which it is ended."""
    alone: bool = False
    """Nothing runs beside it."""
    needs: str = ""
    """A package without which it is skipped."""

    def __post_init__(self) -> None:
        if self.gpus < 0 or not 0 < self.seconds <= self.limit:
            raise ValueError(f"{self.name}: gpus is 0 or more and seconds above 0 and at most limit")

    def arguments(self, work: Path) -> list[str]:
        """The command's words."""
        return shlex.split(re.sub(r"\bWORK\b", lambda _: str(work), self.command))

    @property
    def lacks(self) -> str:
        """Reason for which it cannot run here; empty: it can."""
        measured = not self.needs or importlib.util.find_spec(self.needs) is not None
        return "" if measured else f"needs {self.needs}, which is not installed"


@dataclass(frozen=True, kw_only=True)
class Start:
    """A measurement that starts."""

    measurement: Measurement
    gpus: tuple[int, ...]
    limit: float
    """Seconds after which it is ended: its own limit, or the time that is left."""


def read_plan(path: Path, *, trial: bool = False) -> list[Measurement]:
    """The measurements of a YAML file: its `common` keys are those of every measurement that has no other value.

    A measurement's `trial` is what to append to its command to try it on a CPU, with `trial`; a word of it that is a
    name in `trials` stands for the text there.

    Raises:
        ValueError: two measurements have one name, or a value is not allowed.
        TypeError: a key is missing or unknown.
    """
    content = yaml.safe_load(path.read_text())
    measured = []
    for row in (content.get("common", {}) | row for row in content["measurements"]):
        words = [content.get("trials", {}).get(word, word) for word in row.pop("trial", "").split()]
        measured.append(Measurement(**row | {"command": " ".join([row["command"], *(words if trial else ())])}))
    if len({measurement.name for measurement in measured}) < len(measured):
        raise ValueError(f"{path}: two measurements have one name")
    return measured


def possible(waiting: Sequence[Measurement], *, num_gpus: int, left_s: float) -> list[Measurement]:
    """Those for which the machine has the GPUs and the call has the time."""
    return [each for each in waiting if each.gpus <= num_gpus and each.seconds <= left_s]


def next_start(
    waiting: Sequence[Measurement], running: Sequence[Start], *, num_gpus: int, left_s: float
) -> Start | None:
    """The first possible measurement if it may start now; None if it has to wait, or none is possible.

    Measurements start in the order of the plan: none overtakes one that waits for GPUs or to be alone.
    """
    first = next(iter(possible(waiting, num_gpus=num_gpus, left_s=left_s)), None)
    taken = {gpu for start in running for gpu in start.gpus}
    free = [gpu for gpu in range(num_gpus) if gpu not in taken]
    if first is None or first.gpus > len(free):
        return None
    if running and (first.alone or any(start.measurement.alone for start in running)):
        return None
    return Start(measurement=first, gpus=tuple(free[: first.gpus]), limit=min(first.limit, left_s))


def schedule(
    plan: Sequence[Measurement], *, num_gpus: int, seconds: float, lasts: Callable[[Measurement], float]
) -> Iterator[tuple[float, float, Start]]:
    """(begin, end, start) of what one call would run if measurements lasted so long, in order of their begins."""
    now, waiting = 0.0, list(plan)
    running: list[tuple[float, Start]] = []
    while True:
        start = next_start(waiting, [each for _, each in running], num_gpus=num_gpus, left_s=seconds - now)
        if start is not None:
            waiting.remove(start.measurement)
            end = now + min(lasts(start.measurement), start.limit)
            running.append((end, start))
            yield now, end, start
        elif running:
            now = min(end for end, _ in running)
            running = [(end, each) for end, each in running if end > now]
        else:
            return


def share_of_cores(gpus: Sequence[int], *, num_gpus: int, cores: Sequence[int]) -> list[int]:
    """The cores for a measurement on those GPUs beside others: as many of the host's as it has of the GPUs.

    So that a run on one GPU has what it has on a host with one.
    """
    parts = [cores[len(cores) * gpu // num_gpus : len(cores) * (gpu + 1) // num_gpus] for gpu in gpus]
    return [core for part in parts for core in part] or list(cores)


def calls(plan: Sequence[Measurement], *, num_gpus: int, seconds: float) -> list[list[tuple[float, float, Start]]]:
    """The schedules of all calls that the plan needs if measurements last as expected."""
    waiting, measured = list(plan), []
    while made := list(schedule(waiting, num_gpus=num_gpus, seconds=seconds, lasts=lambda each: each.seconds)):
        measured.append(made)
        done = {start.measurement.name for _, _, start in made}
        waiting = [each for each in waiting if each.name not in done]
    return measured


def unfinished(plan: Sequence[Measurement], records: Mapping[str, Mapping[str, object]]) -> list[Measurement]:
    """The measurements to run: those without a record of the same command that is complete or reached its own limit."""
    return [
        each
        for each in plan
        if (record := records.get(each.name)) is None
        or record["command"] != each.command
        or record["ended"] not in ("done", "limit")
    ]
