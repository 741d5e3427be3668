"""Validates a configuration with pydantic, and says of each problem where it is, what was given and what is allowed."""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from plinth_base.errors import PlinthError

from ..errors import ConfigError, ConfigProblem
from .schema import allowed_words, inner_hint
from .trees import Layer, leaves, shorten, source_of, value_at

ConfigT = TypeVar("ConfigT")


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def validate(cls: type[ConfigT], tree: Any, layers: Sequence[Layer], problems: list[ConfigProblem]) -> ConfigT:
    """The config of a merged tree. Raises ConfigError with `problems` and all that is found here."""
    from pydantic import ValidationError

    unusable = [
        ConfigProblem(path=path, message=f"got {shorten(value)}; allowed: {allowed}", source=source_of(layers, path))
        for path, value in leaves(tree)
        if (allowed := _what_fits(path, value))
    ]
    if unusable:
        raise ConfigError([*problems, *unusable])
    config: ConfigT | None = None
    try:
        # JSON mode because its strictness suits users: true is not an integer, but a list is accepted for a tuple.
        config = _adapter(cast("Any", cls)).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems += [_problem(cls, detail, tree, layers) for detail in found]
    unique = list(dict.fromkeys(problems))
    if unique:
        raise ConfigError(unique)
    assert config is not None
    return config


_MAX_SECONDS = 1e9  # threading.TIMEOUT_MAX is 9e9: waiting longer raises OverflowError


def _what_fits(path: str, value: Any) -> str:
    """What is allowed instead of a number or text that no process, file or tensor can hold; empty if it fits."""
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


def _problem(cls: type, detail: Mapping[str, Any], tree: Any, layers: Sequence[Layer]) -> ConfigProblem:
    missing = detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument")
    loc = detail["loc"]
    path, hint = _locate(cls, loc)
    if missing and path.endswith("]"):  # a fixed list that is too short
        missing, (path, hint) = False, _locate(cls, loc[:-1])
    source = source_of(layers, path)
    if detail["type"] == "value_error":
        return _check_problem(path, detail["ctx"]["error"], layers)
    if missing:
        return ConfigProblem(path=path, message=f"missing; it has no default; allowed: {allowed_words(hint)}")
    value = value_at(tree, path)
    allowed = allowed_words(hint)
    if not detail["type"].endswith(_CLEAR_FROM_THE_TYPE):
        allowed = f"{allowed} ({detail['msg']})"
    return ConfigProblem(path=path, message=f"got {shorten(value)}; allowed: {allowed}", source=source)


def _check_problem(path: str, error: ValueError, layers: Sequence[Layer]) -> ConfigProblem:
    """The problem that a `__post_init__` reports: about a field, or about the whole section."""
    if isinstance(error, PlinthError):
        inner = error.under(path)
        return ConfigProblem(
            path=inner.field or "", message=inner.explanation, source=source_of(layers, inner.field or "")
        )
    return ConfigProblem(path=path, message=str(error))


def _locate(cls: type, loc: Sequence[int | str]) -> tuple[str, Any]:
    """Dotted path and type for pydantic's location, without its markers for union members."""
    hint: Any = cls
    path = ""
    for step in loc:
        if (inner := inner_hint(hint, step)) is None:
            break
        hint, path = inner, f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}".removeprefix(".")
    return path, hint
