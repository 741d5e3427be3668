"""Private parts of DeepSpeed that this package replaces or reads: the only way to them.

A feature declares what it needs in a `Patch` and calls `check` before it uses any of it. DeepSpeed's own path saves in
the foreground and unpickles, so where a version is untested, a name is gone or takes other parameters, the feature is
refused. `python -m ckpt doctor` lists all of them.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from .errors import CheckpointUsageError

#: DeepSpeed's tested versions; pyproject.toml states the same.
TESTED = ">=0.19.8,<0.20"

#: Every Patch of the imported modules.
PATCHES: list["Patch"] = []

#: Names by owner, "module" or "module:Class". "a" is an attribute, "a(b, c)" has these parameters.
Parts = Mapping[str, tuple[str, ...]]

_ABSENT = "deepspeed is not installed"


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """Private parts of DeepSpeed that one feature needs together; `calls` counts the uses of replaced ones."""

    name: str
    reason: str
    replaces: Parts
    reads: Parts
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        PATCHES.append(self)

    def problem(self) -> str | None:
        """The first declared part that the installed DeepSpeed does not have as tested; None if it has all."""
        parts = [(owner, name) for table in (self.replaces, self.reads) for owner in table for name in table[owner]]
        return next(filter(None, (_untested(), *(_missing(*part) for part in parts))), None)

    def check(self) -> None:
        """Raise CheckpointUsageError if DeepSpeed does not have the declared parts as tested."""
        problem = self.problem()
        if problem is not None:
            raise CheckpointUsageError(f"{self.name} cannot work: {problem}. Install deepspeed{TESTED}")

    def replace(self, target: Any, name: str, value: Any) -> Callable[[], None]:
        """Assign the attribute `name` of `target` after `check`; return a function that restores it."""
        assert any(name in names for names in self.replaces.values()), f"{self.name} does not declare {name}"
        original = getattr(target, name)
        setattr(target, name, value)
        return lambda: setattr(target, name, original)


def records() -> list[dict[str, str]]:
    """One row for each Patch of the package, with its state here: active, refused or not installed."""
    for module in ("savers.deepspeed_async", "zero.deepspeed_load"):
        import_module(f"{__package__}.{module}")
    rows = []
    for patch in sorted(PATCHES, key=lambda patch: patch.name):
        problem = patch.problem()
        rows.append(
            {
                "state": "active" if problem is None else "not installed" if problem == _ABSENT else "refused",
                "name": patch.name,
                "replaces": _listed(patch.replaces),
                "reads": _listed(patch.reads),
                "reason": patch.reason,
                "tested": f"deepspeed{TESTED}",
                "otherwise": "refused",
                "problem": problem or "",
            }
        )
    return rows


def report() -> str:
    """The tested versions, and one line for each of `records`."""
    lines = [f"deepspeed: {_untested() or 'a tested version'} (tested: {TESTED})"]
    for row in records():
        problem = f": {row['problem']}" if row["problem"] else ""
        lines.append(f"{row['state']:<14}{row['name']}{problem}")
    return "\n".join(lines)


def _listed(parts: Parts) -> str:
    return "; ".join(f"{owner}: {', '.join(names)}" for owner, names in parts.items())


@cache
def _untested() -> str | None:
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        return _ABSENT
    tested = SpecifierSet(TESTED).contains(found, prereleases=True)
    return None if tested else f"deepspeed {found} is not tested ({TESTED} is)"


@cache
def _missing(owner: str, part: str) -> str | None:
    """What of a part of `owner` does not exist in DeepSpeed. The attributes of instances are found in the code."""
    module, _, class_name = owner.partition(":")
    try:
        found = import_module(module)
        found = getattr(found, class_name) if class_name else found
    except (ImportError, AttributeError) as error:
        return f"{owner} cannot be imported ({error})"
    name, opened, expected = part.partition("(")
    functions = [each for each in vars(found).values() if inspect.isfunction(each)]
    if not hasattr(found, name) and not any(name in each.__code__.co_names for each in functions):
        return f"{owner} has no {name}"
    parameters = inspect.signature(getattr(found, name)).parameters if opened else ()
    given = ", ".join(each for each in parameters if each != "self")
    return f"{owner}.{name} takes ({given}), not ({expected}" if opened and given != expected[:-1] else None
