"""Private parts of DeepSpeed, torch, transformers and PEFT that this package replaces or reads: the only way to them.

A feature declares what it needs in a `Patch` and calls `check` before it uses any of it. If a version is untested, or a
name is gone or has other parameters, upstream's own path runs where it computes the same, and the feature is refused
where it does not. `python -m ds_engine doctor` lists all of them.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from packaging.specifiers import SpecifierSet

from .errors import EngineConfigError

TESTED = {
    "deepspeed": ">=0.19.8,<0.20",
    "flash-attn-4": ">=4.0.0b36,<4.1",
    "peft": ">=0.21.2,<0.22",
    "torch": ">=2.11,<2.14",
    "transformers": ">=5.17,<5.20",
}
"""Tested versions by distribution; pyproject.toml states the same."""

PATCHES: list[Patch] = []
"""Every Patch of the imported modules."""

_MODULES = (
    *("distributed", "guard.collective_guard", "model.compilation", "model.flash4", "model.loading", "model.lora"),
    *("model.nf4", "model.recomputation", "model.sequence_parallel", "state.checkpoint", "state.reshape", "zero.adamw"),
    *("zero.grad_accumulation", "zero.optimizer", "zero.optimizer_step", "zero.zero3_gather", "zero.zero3_gradients"),
    "zero.zero3_hooks",
)
_ABSENT = object()
_said: set[str] = set()

Parts = Mapping[str, tuple[str, ...]]
"""Names by owner, "module" or "module:Class". "a" is an attribute, "a(b, c)" has these parameters, "a|b" is either."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """Private parts of other packages that one feature needs together."""

    name: str
    """The feature."""
    reason: str
    stock: bool
    """Whether upstream's own path, without this feature, computes the same."""
    replaces: Parts = field(default_factory=dict)
    reads: Parts = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of replaced methods and assignments of replaced values, by name."""

    def __post_init__(self) -> None:
        PATCHES.append(self)

    @property
    def distributions(self) -> list[str]:
        """Distributions of the owners."""
        return sorted({_distribution(owner) for owner in chain(self.replaces, self.reads)})

    def problem(self) -> str | None:
        """The first declared part that the installed packages do not have as tested; None if they have all."""
        found = map(_untested, self.distributions)
        parts = [(owner, name) for owner, names in chain(self.replaces.items(), self.reads.items()) for name in names]
        return next(filter(None, chain(found, (_missing(*part) for part in parts))), None)

    def check(self) -> bool:
        """Whether the feature may be used; False if upstream's own path must run, which rank 0 then logs once.

        Raises:
            EngineConfigError: it may not, and upstream's own path does not compute the same.
        """
        problem = self.problem()
        if problem is None:
            return True
        if not self.stock:
            versions = ", ".join(f"{name}{TESTED[name]}" for name in self.distributions)
            raise EngineConfigError(f"{self.name} cannot work: {problem}. Install {versions}")
        if self.name not in _said:
            _said.add(self.name)
            warn_on_first_rank(f"{self.name}: upstream's own path is used: {problem}")
        return False

    def replace(self, target: Any, **values: Any) -> Callable[[], None]:
        """Assign `values` to attributes of `target` after `check`; returns a function that restores them.

        Calls of Python functions, and assignments of other values, are counted.
        """
        replaced = {name for names in self.replaces.values() for part in names for name in _names(part)}
        assert replaced >= values.keys(), f"{self.name} does not declare {values.keys() - replaced}"
        # From vars: getattr would bind or unwrap, which could not be restored.
        originals = {name: vars(target).get(name, _ABSENT) for name in values}
        for name, value in values.items():
            if callable(value) and not isinstance(value, BuiltinFunctionType):  # torch.compile traces those
                value = self.counted(name, value)
            else:
                self.calls[name] += 1
            setattr(target, name, value)

        def restore() -> None:
            for name, original in originals.items():
                delattr(target, name) if original is _ABSENT else setattr(target, name, original)

        return restore

    @contextmanager
    def replaced(self, target: Any, **values: Any) -> Iterator[None]:
        """Context in which `values` are attributes of `target`, see `replace`."""
        restore = self.replace(target, **values)
        try:
            yield
        finally:
            restore()

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are counted under `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call


def records() -> list[dict[str, str]]:
    """One row for each Patch of the package, with its state here: active, stock path, refused or not installed."""
    for module in _MODULES:
        import_module(f"{__package__}.{module}")
    rows = []
    for patch in sorted(PATCHES, key=lambda patch: patch.name):
        problem = patch.problem()
        state = "active" if problem is None else "stock path" if patch.stock else "refused"
        if problem is not None and problem.endswith("is not installed"):
            state = "not installed"
        rows.append(
            {
                "state": state,
                "name": patch.name,
                "replaces": _listed(patch.replaces),
                "reads": _listed(patch.reads),
                "reason": patch.reason,
                "tested": ", ".join(f"{name}{TESTED[name]}" for name in patch.distributions),
                "otherwise": "stock path" if patch.stock else "refused",
                "problem": problem or "",
            }
        )
    return rows


def report() -> str:
    """Installed and tested versions, and one line for each of `records`."""
    lines = []
    for name, tested in TESTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        lines.append(f"{name} {found} (tested: {tested})")
    for row in records():
        problem = f": {row['problem']}" if row["problem"] else ""
        lines.append(f"{row['state']:<14}{row['name']}{problem}")
    return "\n".join(lines)


def transformers_message(error: Exception) -> str:
    """The first line of transformers' error: the next ones list all classes, or advise an upgrade of a pinned stack."""
    line = str(error).partition("\n")[0]
    if found := re.match(r"Unrecognized configuration class <class '[\w.]*?(\w+)'> for .*: (\w+)", line):
        return f"transformers has no {found[2]} of {found[1]}"
    if "does not recognize this architecture" not in line:
        return line
    what, tested = line.partition(". ")[0], TESTED["transformers"]
    return f"{what}; installed is transformers {version('transformers')}, tested is {tested}"


def _listed(parts: Parts) -> str:
    return "; ".join(f"{owner}: {', '.join(names)}" for owner, names in parts.items())


def warn_on_first_rank(line: str) -> None:
    """Log one line on rank 0."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        logging.getLogger("ds_engine").warning("%s", line)


def _distribution(owner: str) -> str:
    package = owner.partition(":")[0].partition(".")[0]
    return "flash-attn-4" if package == "flash_attn" else package


@cache
def _untested(distribution: str) -> str | None:
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"{distribution} is not installed"
    tested = TESTED[distribution]
    if SpecifierSet(tested).contains(found, prereleases=True):
        return None
    return f"{distribution} {found} is not tested ({tested} is)"


@cache
def _missing(owner: str, part: str) -> str | None:
    """What of a part of `owner` does not exist upstream."""
    module, _, class_name = owner.partition(":")
    try:
        found = import_module(module)
        found = getattr(found, class_name) if class_name else found
    except (ImportError, AttributeError) as error:
        return f"{owner} cannot be imported ({error})"
    names, (_, opened, parameters) = _names(part), part.partition("(")
    name = next((name for name in names if name in _mentioned(found) or hasattr(found, name)), None)
    if name is None:
        return f"{owner} has no {' or '.join(names)}"
    given = ", ".join(_parameters(found, name)) if opened else ""
    return f"{owner}.{name} takes ({given}), not ({parameters}" if opened and given != parameters[:-1] else None


def _names(part: str) -> list[str]:
    return part.partition("(")[0].split("|")


@cache
def _mentioned(owner: Any) -> frozenset[str]:
    """Names of attributes and variables in the code of a class or module: its instances' attributes, too."""
    names: set[str] = set()
    for each in _classes(owner):
        names.update(vars(each).get("__annotations__", ()))
    for code in _codes(owner):
        names.update(code.co_names, (value for value in code.co_consts if isinstance(value, str)))
    return frozenset(names)


def _parameters(owner: Any, name: str) -> tuple[str, ...]:
    """Names of the parameters of a method, or of a function that is defined in one, without self."""
    function = _undecorated(inspect.getattr_static(owner, name, None))
    code = function.__code__ if function else next((code for code in _codes(owner) if code.co_name == name), None)
    if code is None:
        return ("?",)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names[1:] if names[:1] == ("self",) else names


def _classes(owner: Any) -> list[Any]:
    if isinstance(owner, type):
        return list(owner.__mro__[:-1])
    return [each for each in vars(owner).values() if issubclass(type(each), type) and each.__module__ == owner.__name__]


def _codes(owner: Any) -> Iterator[CodeType]:
    """Code of all functions of a class or module, with those defined inside them."""
    functions = [_undecorated(value) for each in [owner, *_classes(owner)] for value in vars(each).values()]
    codes = [function.__code__ for function in functions if function]
    while codes:
        yield (code := codes.pop())
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]


def _undecorated(value: Any) -> FunctionType | None:
    """The function inside a method, property or decorator; DeepSpeed's decorators do not set __wrapped__."""
    if type(value) in (staticmethod, classmethod, property):
        value = value.fget if type(value) is property else value.__func__
    while callable(value):
        inner = getattr(value, "__wrapped__", None)
        if inner is None and type(value) is FunctionType:
            if value.__code__.co_argcount > 0 or not value.__closure__:
                return value
            contents = [cell.cell_contents for cell in value.__closure__]
            inner = next((content for content in contents if callable(content)), None)
            if inner is None:
                return value
        value = inner
    return None
