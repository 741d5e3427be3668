"""Values of a configuration as trees of dicts, lists and scalars, and the layers that they come from."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .schema import MISSING, field_hints


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One source of values: a file or one override."""

    source: str
    tree: dict[str, Any]


def plain_tree(value: Any) -> Any:
    """Config dataclasses, tuples, paths and enums as dicts, lists and scalars, ready for YAML; `${` is escaped."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain_tree(getattr(value, name)) for name in field_hints(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_tree(item) for item in value]
    if isinstance(value, Enum):
        return plain_tree(value.value)
    if isinstance(value, (str, Path)):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))
    return value


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a tree that is no mapping and no list."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}".removeprefix("."))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted settings as a tree."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


def value_at(tree: Any, path: str) -> Any:
    """Value at a path, or MISSING."""
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(tree, dict) and step in tree:
            tree = tree[step]
        elif isinstance(tree, list) and step.isdecimal() and int(step) < len(tree):
            tree = tree[int(step)]
        else:
            return MISSING
    return tree


def source_of(layers: Sequence[Layer], path: str) -> str:
    """The last layer that set the key (or its section)."""
    key = path.partition("[")[0]
    return next((layer.source for layer in reversed(layers) if key and value_at(layer.tree, key) is not MISSING), "")
