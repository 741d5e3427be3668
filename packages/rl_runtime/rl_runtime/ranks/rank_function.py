"""Functions by import path: the driver sends the path to the ranks instead of the function."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import InputError


@dataclass(frozen=True, kw_only=True)
class RankFunction:
    """The function `module:name` and the keyword arguments it is called with; pickles by value."""

    module: str
    name: str
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Callable[..., Any]) -> "RankFunction":
        """The import path of a function, or of a `functools.partial` with keyword arguments.

        For a function of `__main__` (`python -m apps.ppo.main`), the module is the name given to `python -m`.

        Raises:
            InputError: the ranks cannot import the function: it is a lambda, nested in another function, or defined
                in a script.
        """
        function: Any = given
        keywords: dict[str, Any] = {}
        while isinstance(function, partial):
            if function.args:
                raise InputError(f"{function.func!r} has positional arguments", remedy="give them by keyword")
            function, keywords = function.func, {**function.keywords, **keywords}
        name = getattr(function, "__qualname__", "")
        if not name or "<" in name or "." in name:
            raise InputError(
                f"{function!r} cannot be imported by the trainer ranks",
                remedy="define it with `def` at the top level of a module and bind its settings with functools.partial",
            )
        module = function.__module__
        if module == "__main__":
            spec = getattr(sys.modules["__main__"], "__spec__", None)
            if spec is None:
                raise InputError(
                    f"{name!r} is defined in a script, which the trainer ranks cannot import",
                    remedy="move it to a module, or run the script with python -m",
                )
            module = spec.name
        return cls(module=module, name=name, keywords=keywords)

    def load(self) -> Callable[..., Any]:
        """Imports the function and binds its keyword arguments."""
        function: Callable[..., Any] = getattr(import_module(self.module), self.name)
        return partial(function, **self.keywords) if self.keywords else function
