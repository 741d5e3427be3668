"""A DeepSpeed that calls one of its methods or attributes by another name, and training with it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

from ds_engine_testkit import Sample, distance
from ds_engine_worker import train

from ds_engine import EngineConfig, EngineConfigError
from ds_engine.distributed import SHARED_MEMORY
from ds_engine.upstream import FENCE
from plinth_base.fence import forget


@cache
def _parts(package: str) -> tuple[list[FunctionType], list[Any]]:
    """All functions of a package, also those inside decorators, and all of its classes and modules."""
    gc.unfreeze()  # what is frozen is in no list
    objects = [each for each in gc.get_objects() if type(each) is FunctionType or issubclass(type(each), type)]
    own = [each for each in objects if f"{each.__module__}.".startswith(f"{package}.")]
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]
    functions = [each for each in own if type(each) is FunctionType]
    return functions, [*modules, *(each for each in own if type(each) is not FunctionType)]


def _renamed_code(code: CodeType, old: str, new: str) -> CodeType:
    consts = [
        _renamed_code(value, old, new) if isinstance(value, CodeType) else new if value == old else value
        for value in code.co_consts
    ]
    names = [new if name == old else name for name in code.co_names]
    return code.replace(co_names=tuple(names), co_consts=tuple(consts))


@contextmanager
def renamed(name: str, package: str = "deepspeed") -> Iterator[None]:
    """Context in which `package` has and uses `name` only under another name."""
    new = f"{name}_of_the_next_version"
    functions, owners = _parts(package)
    codes = [(function, function.__code__) for function in functions]
    holders = [owner for owner in owners if name in vars(owner)]
    annotated = [table for owner in owners if name in (table := vars(owner).get("__annotations__") or {})]
    for function, code in codes:
        if (changed := _renamed_code(code, name, new)) != code:
            function.__code__ = changed
    for holder in holders:
        setattr(holder, new, vars(holder)[name])
        delattr(holder, name)
    for table in annotated:
        table[new] = table.pop(name)
    forget()
    try:
        yield
    finally:
        for function, code in codes:
            function.__code__ = code
        for holder in holders:
            setattr(holder, name, vars(holder)[new])
            delattr(holder, new)
        for table in annotated:
            table[name] = table.pop(new)
        forget()


def names_of(patches: Sequence[str]) -> list[str]:
    """The names that these patches replace."""
    tables = [each.replaces for each in FENCE.patches if each.name in patches]
    assert len(tables) == len(patches)
    return sorted({part.partition("(")[0] for table in tables for names in table.values() for part in names})


def take_calls() -> dict[str, dict[str, int]]:
    """Calls of what each patch replaces, by patch and name, since this was last called in this process."""
    calls = {}
    for each in FENCE.patches:
        calls[each.name] = {name: each.calls[name] for name in each.replaced_names}
        if each is not SHARED_MEMORY:  # made once, when the process joins
            each.calls.clear()
    return calls


def train_with_each_renamed(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]], patches: list[str]
) -> dict[str, Any]:
    """By renamed name, and by "untested" for an untested version: how far training is from this package's own way
    (largest relative distances of weights and norms), and the features that are left out; or the refusal."""
    expected = train(model_path, config, steps)

    def outcome() -> Any:
        try:
            result = train(model_path, config, steps)
        except EngineConfigError as error:
            return str(error)
        norms = [abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(result["stats"], expected["stats"], strict=True)]
        weights = [distance(result["weights"][name], weight) for name, weight in expected["weights"].items()]
        left_out = [each.name for each in FENCE.patches if each.name in patches and each.problem()]
        return max([*weights, 0.0]), max(norms), left_out

    outcomes = {}
    for name in names_of(patches):
        with renamed(name):
            outcomes[name] = outcome()
    with patch.dict(FENCE.tested, deepspeed=">=99"):
        forget()
        outcomes["untested"] = outcome()
    forget()
    return outcomes
