"""Imports functions named in the configuration as `package.module:function`."""

import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

from rollout_vllm.episodes.processes import describe

from ..errors import InputError


def load_attribute(name: str, *, key: str, form: str = "package.module:function") -> Callable[..., Any]:
    """Imports the function or class of the configuration key `key`.

    Raises:
        InputError: it cannot be imported or called; says what is allowed.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise InputError(field=key, value=name, allowed=form)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        remedy = "run in the folder of the module, or add it to PYTHONPATH" if isinstance(error, ImportError) else None
        problem = f"{module_name} cannot be imported ({describe(error)})"
        raise InputError(problem, field=key, value=name, remedy=remedy) from error
    target = getattr(module, attribute, None)
    if not callable(target):
        problem = f"{module_name} has no {form.partition(':')[2].lower()} {attribute!r}"
        raise InputError(problem, field=key, value=name)
    loaded: Callable[..., Any] = target
    return loaded


def load_function(
    name: str,
    *,
    key: str,
    arguments: tuple[str, ...],
    keywords: Collection[str] = (),
    offered: Collection[str] = (),
    is_coroutine: bool | None = False,
    advise: Callable[[Callable[..., Any]], str] = lambda _: "",
) -> Callable[..., Any]:
    """Imports the function of the configuration key `key`; checks that it takes `arguments` and `keywords`.

    offered: further keywords, which it gets if it has parameters of these names. is_coroutine: whether it must be a
    coroutine function; None: as it is. advise: what to write instead of a function that does not take the arguments.

    Raises:
        InputError: the function cannot be imported or called; says what is allowed.
    """
    function, attribute = load_attribute(name, key=key), name.partition(":")[2]
    if is_coroutine is not None and inspect.iscoroutinefunction(function) != is_coroutine:
        raise InputError(
            f"it is {'no' if is_coroutine else 'a'} coroutine function",
            field=key,
            value=name,
            allowed=f"`{'async def' if is_coroutine else 'def'} {attribute}({', '.join(arguments)})`",
        )
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments, **dict.fromkeys((*keywords, *(signature.parameters.keys() & set(offered)))))
    except TypeError as error:
        call = f"{attribute}({', '.join((*arguments, *keywords))})"
        problem = f"it cannot be called as {call}: {error}"
        raise InputError(problem, field=key, value=name, remedy=advise(function) or None) from error
    return function
