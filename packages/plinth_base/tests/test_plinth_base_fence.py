"""A version, name or signature that differs from the tested one ends in upstream's own path or in a refusal."""

import functools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from plinth_base import PlinthError
from plinth_base.fence import Fence, Patch, forget, is_within, missing_part


class FeatureError(PlinthError):
    """A feature cannot be used."""


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides the function, as some upstream ones do."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Upstream:
    """A class of another package."""

    size: int

    def step(self, scale: float, closure: object = None) -> float:
        self.last = scale
        return scale

    @classmethod
    def make(cls, size: int) -> None: ...

    @traced
    def traced(self, name: str) -> None: ...

    @functools.cached_property
    def cached(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the installed distribution `hypothesis`, whose parts are private."""
    module = ModuleType("hypothesis.upstream")
    vars(module)["Upstream"] = Upstream
    monkeypatch.setitem(sys.modules, module.__name__, module)
    forget()
    yield
    forget()


def fence_of(lines: list[str], *, tested: str = ">=1", announces: bool = False) -> Fence:
    return Fence(
        {"hypothesis": tested, "vllm": ">=99", "nowhere": ">=1"},
        warn=lines.append,
        refusal=FeatureError,
        announce=lines.append if announces else None,
    )


def patch_of(
    fence: Fence, part: str = "step(scale, closure)", *, otherwise: Literal["stock path", "refused"] = "stock path"
) -> Patch:
    owner = "hypothesis.upstream:Upstream"
    return fence.patch(name="a step", reason="a test", otherwise=otherwise, replaces={owner: (part, "last")})


def test_replacements_are_counted_and_restored() -> None:
    patch, target = patch_of(fence_of([])), Upstream()
    target.last = 0.0
    restore = patch.replace(target, step=lambda scale: 2 * scale, last=7.0)
    assert [target.step(3.0), target.step(4.0)] == [6.0, 8.0]
    assert target.last == 7.0
    assert patch.calls == patch.fence.num_calls() == {"step": 2, "last": 1}
    restore()
    assert vars(target) == {"last": 0.0}
    with patch.replaced(target, step=len):
        assert target.step is len, "torch.compile traces builtin functions"
    assert target.step(3.0) == 3.0
    with pytest.raises(AssertionError, match="does not declare"):
        patch.replace(target, backward=len)


def test_a_wrapper_is_applied_once_and_keeps_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upstream, "step", Upstream.step)
    replaces = {"hypothesis.upstream:Upstream": ("step(scale, closure)",)}
    patch = fence_of([]).patch(name="a step", reason="a test", otherwise="stock path", replaces=replaces)
    restore = patch.wrap(lambda original: lambda self, scale: -original(self, scale))
    patch.wrap(lambda original: lambda self, scale: 100.0)
    assert Upstream().step(3.0) == -3.0
    assert patch.calls == {"step": 1}
    assert patch.problem() is None
    restore()
    assert Upstream().step(3.0) == 3.0
    untested = fence_of([], tested=">=999").patch(
        name="a step", reason="a test", otherwise="stock path", replaces=replaces
    )
    untested.wrap(lambda original: lambda self, scale: 100.0)
    assert Upstream().step(3.0) == 3.0


def test_an_announced_replacement_says_so_once_and_is_then_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upstream, "step", stock := Upstream.step)
    lines: list[str] = []
    patch = patch_of(fence_of(lines, announces=True))

    def double(self: Any, scale: float) -> float:
        return 2 * scale

    restore = patch.replace(Upstream, step=double)
    imported = Upstream.step  # by a module, before the first call
    assert [Upstream().step(1.0), imported(Upstream(), 2.0), Upstream().step(3.0)] == [2.0, 4.0, 6.0]
    assert Upstream.step is double
    assert lines == ["a step: step is replaced and in use"]
    restore()
    assert Upstream.step is stock


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("step(scale, closure)", None),
        ("step(scale, ...)", None),
        ("step(...)", "takes (scale, closure), not (...)"),  # scale has no default
        ("step(closure, scale)", "takes (scale, closure), not (closure, scale)"),
        ("step(scale)", "takes (scale, closure), not (scale)"),
        ("make(size)", None),
        ("traced(name)", None),
        ("traced()", "takes (name), not ()"),
        ("last|newest", None),
        ("size", None),
        ("cached", None),
        ("stop()", "has no stop"),
        ("stop|halt", "has no stop or halt"),
    ],
)
def test_a_missing_name_and_another_signature_are_found(part: str, problem: str | None) -> None:
    """Upstream's own path, which computes the same, runs, and one line says so."""
    lines: list[str] = []
    patch = patch_of(fence_of(lines), part)
    assert [patch.check(), patch.check()] == [problem is None] * 2
    assert len(lines) == (problem is not None)
    assert problem is None or (patch.problem() or "").endswith(problem)
    refused = patch_of(fence_of([]), part, otherwise="refused")
    if problem is None:
        assert refused.check()
    else:
        with pytest.raises(FeatureError) as caught:
            refused.check()
        assert caught.value.remedy == "install hypothesis>=1"
        assert problem in caught.value.problem


def test_a_module_or_class_that_cannot_be_imported_is_a_problem() -> None:
    assert "cannot be imported" in (missing_part("hypothesis.nowhere", "a") or "")
    assert "cannot be imported" in (missing_part("hypothesis.upstream:Downstream", "a") or "")


def test_an_untested_version_is_a_problem_and_a_missing_distribution_is_told_apart() -> None:
    lines: list[str] = []
    fence = fence_of(lines, tested="<2")
    untested = patch_of(fence)
    assert not untested.check()
    installed = version("hypothesis")
    assert lines == [f"a step: upstream's own path is used: hypothesis {installed} is not tested (<2 is)"]
    fence.patch(name="another", reason="a test", otherwise="refused", reads={"nowhere": ("a",)})
    states = {row["name"]: row["state"] for row in fence.records(["json"])}
    assert states == {"a step": "stock path", "another": "not installed"}


VERSIONS = st.from_regex(r"[0-4]\.[0-4](\.[0-4])?((a|b|rc|\.dev)[0-2])?(\+cpu)?", fullmatch=True)
BOUNDS = st.from_regex(r"(>=[0-4]\.[0-4](b[0-2])?)?", fullmatch=True)


@given(installed=VERSIONS, lower=BOUNDS, upper=st.from_regex(r"<[0-4]\.[0-4]", fullmatch=True))
@example(installed="4.0.0b36", lower=">=4.0.0b36", upper="<4.1")
@example(installed="0.20.0.dev1", lower=">=0.19.8", upper="<0.20")
def test_bounds_are_those_of_packaging(installed: str, lower: str, upper: str) -> None:
    bounds = f"{lower},{upper}" if lower else upper
    assert is_within(installed, bounds) == SpecifierSet(bounds).contains(Version(installed), prereleases=True)
