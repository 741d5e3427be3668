"""Validates a configuration with pydantic, and says of each problem where it is, what was given and what is allowed."""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from ..errors import ConfigError
from .schema import MISSING, allowed_words, inner_hint
from .trees import Layer, leaves, source_of, value_at

ConfigT = TypeVar("ConfigT")


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def validate(cls: type[ConfigT], tree: Any, layers: Sequence[Layer], problems: list[ConfigError]) -> ConfigT:
    """The config of a merged tree. Raises ConfigError with `problems` and all that is found here."""
    from pydantic import ValidationError

    unusable = [
        ConfigError(field=path, value=value, allowed=allowed, source=source_of(layers, path))
        for path, value in leaves(tree)
        if (allowed := _fitting_words(path, value))
    ]
    if unusable:
        raise ConfigError.of([*problems, *unusable])
    config: ConfigT | None = None
    try:
        # JSON mode because its strictness suits users: true is not an integer, but a list is accepted for a tuple.
        config = _adapter(cast("Any", cls)).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problems += [_problem(cls, detail, tree, layers) for detail in error.errors(include_url=False)]
    if problems:  # each once: pydantic reports one for every member of a union
        raise ConfigError.of(list({str(problem): problem for problem in problems}.values()))
    assert config is not None
    return config


_MAX_SECONDS = 1e9  # threading.TIMEOUT_MAX is 9e9: waiting longer raises OverflowError


def _fitting_words(path: str, value: Any) -> str:
    """Allowed values in place of one that no process, file or tensor can hold; empty if the value fits."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer of 64 bits"
    if isinstance(value, (int, float)) and path.endswith("_s") and value > _MAX_SECONDS:
        return f"at most {_MAX_SECONDS:.0e} seconds; names that end in _s are times"
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        return "text without NUL characters and lone surrogates (bytes that are not UTF-8)"
    return ""


_CLEAR_FROM_THE_TYPE = ("_type", "_parsing", "_from_float", "literal_error", "enum", "none_required", "missing")
"""Ends of pydantic's error types whose message adds nothing to the allowed values."""


def _problem(cls: type, detail: Mapping[str, Any], tree: Any, layers: Sequence[Layer]) -> ConfigError:
    missing = detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument")
    loc = detail["loc"]
    path, hint = _locate(cls, loc)
    if missing and path.endswith("]"):  # a fixed list that is too short
        missing, (path, hint) = False, _locate(cls, loc[:-1])
    if detail["type"] == "value_error":
        return _check_problem(path, detail["ctx"]["error"], layers)
    allowed = allowed_words(hint)
    if missing:
        return ConfigError("missing; it has no default", field=path, allowed=allowed)
    if not detail["type"].endswith(_CLEAR_FROM_THE_TYPE):
        allowed = f"{allowed} ({detail['msg']})"
    value = value_at(tree, path)
    given = ... if value is MISSING else value
    return ConfigError(field=path, value=given, allowed=allowed, source=source_of(layers, path))


def _check_problem(path: str, error: Exception, layers: Sequence[Layer]) -> ConfigError:
    """The problem that a `__post_init__` reports: about a field, or about the whole section."""
    if not hasattr(error, "allowed"):
        return ConfigError(str(error), field=path)
    own: Any = error  # a PlinthError, or one of rl_core, which imports no other package and has the same fields
    field = ".".join(filter(None, (path, own.field)))
    return ConfigError(
        own.problem,
        field=field,
        value=own.value,
        allowed=own.allowed,
        remedy=own.remedy,
        source=source_of(layers, field),
    )


def _locate(cls: type, loc: Sequence[int | str]) -> tuple[str, Any]:
    """Dotted path and type for pydantic's location, without its markers for union members."""
    hint: Any = cls
    path = ""
    for step in loc:
        if (inner := inner_hint(hint, step)) is None:
            break
        hint, path = inner, f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}".removeprefix(".")
    return path, hint
