"""Schema of a config dataclass: keys as dotted paths, types in words, and the documentation below fields.

Standard library only. Documentation is read from the source, without importing or executing it.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

MISSING = dataclasses.MISSING
"""Marks a key without a default."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One settable value of a configuration."""

    path: str
    hint: Any
    default: Any
    owner: type
    name: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A nested dataclass: the mapping at `path`."""

    path: str
    cls: type
    off: bool
    """The section is null, or inside a section that is null, unless a value is given."""


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """Type of each init field of a dataclass, string annotations resolved."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def field_default(cls: type, name: str) -> Any:
    """Default value of a field, or MISSING."""
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def alternatives(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """The members of a union without None, and whether None is allowed."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
        flat = tuple(alternatives(m)[0][0] for m in members if m is not type(None))
        return flat, type(None) in members
    return (hint,), hint in (None, type(None), Any)


def section_class(hint: Any) -> type | None:
    """The dataclass that this hint nests (also when optional), or None for a plain value."""
    members, _ = alternatives(hint)
    nested = [m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)]
    return nested[0] if len(members) == len(nested) == 1 else None


def choices(hint: Any) -> tuple[Any, ...]:
    """The values that the Literal and Enum members of a type list."""
    values: list[Any] = []
    for member in alternatives(hint)[0]:
        if get_origin(member) is Literal:
            values += get_args(member)
        elif isinstance(member, type) and issubclass(member, Enum):
            values += [one.value for one in member]
    return tuple(values)


def item_hint(hint: Any, index: int = 0) -> Any | None:
    """Item type of a sequence hint (at `index` of a fixed-length tuple); None if it is not a sequence."""
    for member in alternatives(hint)[0]:
        origin, args = get_origin(member) or member, get_args(member)
        if origin is tuple and args:
            if len(args) == 2 and args[1] is Ellipsis:
                return args[0]
            return args[min(index, len(args) - 1)]
        if isinstance(origin, type) and issubclass(origin, Sequence) and not issubclass(origin, (str, bytes)):
            return args[0] if args else Any
    return None


def value_hint(hint: Any) -> Any | None:
    """Value type of a mapping hint; None if it is not a mapping."""
    for member in alternatives(hint)[0]:
        origin, args = get_origin(member) or member, get_args(member)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return args[1] if args else Any
    return None


def inner_hint(hint: Any, key: str | int) -> Any | None:
    """Type of what a section, mapping or sequence holds under a key or index; None where it holds nothing."""
    if hint is None:
        return None
    if isinstance(key, int):
        return item_hint(hint, key)
    nested = section_class(hint)
    return value_hint(hint) if nested is None else field_hints(nested).get(key)


def wants_text(hint: Any) -> bool:
    """True if a plain scalar is read as text, unchanged (`1.10` stays `1.10`)."""
    members, _ = alternatives(hint)
    return bool(members) and all(
        m in (str, Path) or (choices(m) and all(isinstance(value, str) for value in choices(m))) for m in members
    )


def accepts_text(hint: Any) -> bool:
    """True if the type admits text."""
    members, _ = alternatives(hint)
    return any(m is Any or wants_text(m) for m in members)


def entries(cls: type, prefix: str = "", instance: Any = MISSING) -> Iterator[Key | Section]:
    """Every section and key of a config class, depth first, in the order of the source.

    Args:
        prefix: prepended to each path.
        instance: its values are the defaults; None for a section that is off, MISSING for the defaults of `cls`.
    """
    for name, hint in field_hints(cls).items():
        path = f"{prefix}{name}"
        default = getattr(instance, name) if isinstance(instance, cls) else field_default(cls, name)
        nested = section_class(hint)
        if nested is None:
            yield Key(path=path, hint=hint, default=default, owner=cls, name=name)
            if (named := section_class(value_hint(hint))) is not None:
                yield Section(path=f"{path}.NAME", cls=named, off=True)
                yield from entries(named, f"{path}.NAME.")
        else:
            off = instance is None or default is None
            yield Section(path=path, cls=nested, off=off)
            yield from entries(nested, f"{path}.", None if off else default)


def all_paths(cls: type) -> list[str]:
    """Dotted paths of all sections and keys."""
    return [entry.path for entry in entries(cls)]


def nearest_paths(cls: type, path: str, *, limit: int = 2) -> list[str]:
    """Keys closest to an unknown path, best first; empty when none is close.

    Keys whose last word is right (`zero.stage` for `actor.zero.stage`) and those that other programs call so
    (`PEER_KEYS` of the root class: their name, or its last one or two words, -> our keys) come alone. Otherwise close
    spellings of the whole path come first, then those of its last word, then of a part of that (`clip` in `clip_low`).
    """
    paths = all_paths(cls)
    last_word = path.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for known in paths:
        by_last.setdefault(known.rpartition(".")[2], []).append(known)

    def closeness(known: str) -> float:
        return difflib.SequenceMatcher(a=path, b=known).ratio()

    def places(word: str) -> list[str]:
        # All places of a bare word are equally close: keep the order of the source.
        known = by_last.get(word, [])
        return sorted(known, key=closeness, reverse=True) if "." in path else known

    peers: Mapping[str, Sequence[str]] = getattr(cls, "PEER_KEYS", {})
    names = (path, ".".join(path.split(".")[-2:]))
    theirs = [key for name in names for key in peers.get(name, ())]
    theirs += [*places(last_word), *peers.get(last_word, ())]
    if named := [known for known in theirs if known in paths]:
        return list(dict.fromkeys(named))[:limit]
    near = [*difflib.get_close_matches(path, paths, n=limit, cutoff=0.7)]
    for word in difflib.get_close_matches(last_word, list(by_last), n=limit, cutoff=0.7):
        near += places(word)
    if not near:
        parts = sorted({part for word in by_last for part in word.split("_")})
        for part in difflib.get_close_matches(last_word, parts, n=1, cutoff=0.7):
            near = [known for word, keys in by_last.items() if part in word.split("_") for known in keys]
    return list(dict.fromkeys(near))[:limit]


_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    Any: "any value",
}


def allowed_words(hint: Any) -> str:
    """Allowed values of a key in words: `one of none, cpu`, `an integer or null`."""
    members, nullable = alternatives(hint)
    phrases = [_member_words(member) for member in members if member is not type(None)]
    return " or ".join([*phrases, *(["null"] if nullable and Any not in members else [])])


def _member_words(member: Any) -> str:
    if values := choices(member):
        return "one of " + ", ".join(map(str, values))
    if isinstance(member, type) and dataclasses.is_dataclass(member):
        return "a section with the keys " + ", ".join(field_hints(member))
    args = get_args(member)
    if get_origin(member) is tuple and args and Ellipsis not in args:
        return f"a list of {len(args)} values: " + ", ".join(allowed_words(arg) for arg in args)
    if (item := item_hint(member)) is not None:
        return f"a list, each item {allowed_words(item)}"
    if (value := value_hint(member)) is not None:
        return f"a mapping, each value {allowed_words(value)}"
    return _WORDS.get(member, getattr(member, "__name__", str(member)))


def type_text(hint: Any) -> str:
    """A type as in a signature, shortened: `int | None`, `none|cpu|nvme`, `tuple[str, ...]`."""
    members, nullable = alternatives(hint)
    texts = [_member_text(member) for member in members if member is not type(None)]
    return " | ".join([*texts, *(["None"] if nullable and Any not in members else [])])


def _member_text(member: Any) -> str:
    if values := choices(member):
        return "|".join(map(str, values))
    if args := get_args(member):
        name = getattr(get_origin(member), "__name__", str(get_origin(member)))
        return f"{name}[{', '.join('...' if arg is Ellipsis else type_text(arg) for arg in args)}]"
    return getattr(member, "__name__", str(member))


def field_doc(cls: type, name: str) -> str:
    """Documentation of a dataclass field on one line; empty if there is none or no source."""
    docs = (_module_docs(owner.__module__).get((owner.__qualname__, name)) for owner in cls.__mro__)
    return next((doc for doc in docs if doc), "")


def class_doc(cls: type) -> str:
    """First line of a class's own docstring; empty without one (the one that `dataclass` generates does not count)."""
    doc = (cls.__doc__ or "").strip()
    return "" if doc.startswith(f"{cls.__name__}(") else doc.partition("\n")[0]


@functools.cache
def _module_docs(module: str) -> dict[tuple[str, str], str]:
    """Docs of all annotated names in a module's source, by (qualified class name, field name)."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # built in, typed at a prompt, or without its source
        return {}
    docs: dict[tuple[str, str], str] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(node.body, f"{prefix}{node.name}.<locals>.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                docs[prefix.removesuffix("."), node.target.id] = " ".join(_string(following).split())

    visit(tree.body, "")
    return docs


def _string(node: ast.stmt | None) -> str:
    """The text of a statement that is only a string; else empty."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
