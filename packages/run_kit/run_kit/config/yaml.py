"""YAML parsing for config files and overrides, guided by the types of a config dataclass.

Differences from PyYAML's defaults, each to avoid a known trap: only `true`/`false` are booleans (`off` and `no` stay
text), `1e-4` is a number, `None` is null, dates stay text, duplicate keys are refused, and where the dataclass
expects text a plain scalar is taken as written (`tag: 1.10` is "1.10").
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from .schema import inner_hint, item_hint, wants_text

_TAG = "tag:yaml.org,2002:"
_RESOLVERS: list[tuple[str, str, str]] = [
    ("null", r"^(?:~|null|Null|NULL|None|)$", "~nN\0"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0x[0-9a-fA-F]+|0o[0-7]+|[0-9]+(?:_[0-9]+)*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]+)|[0-9][0-9_]*\.(?:[0-9]+)?(?:[eE][-+]?[0-9]+)?"
        r"|\.[0-9]+|\.?(?:inf|Inf|INF))$|^\.?(?:nan|NaN|NAN)$",
        "-+.0123456789inIN",
    ),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute, replaced on purpose


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML prints U+0085 unquoted, but readers take it for a line end. Quotes escape it.
        return self.represent_scalar(_TAG + "str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)

for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(_pattern), ["" if c == "\0" else c for c in _first])


_KINDS = {name: re.compile(pattern) for name, pattern, _ in _RESOLVERS}
_MAX_DEPTH, _MAX_VALUES = 50, 100_000
_MAX_DIGITS = 4_000  # Python refuses to convert more than 4,300
_TOO_DEEP = (
    f"nested more than {_MAX_DEPTH} levels deep, more than {_MAX_VALUES:,} values, or an anchor that contains itself"
)


class YamlError(ValueError):
    """Invalid YAML; the message has line and column."""


def parse_typed(text: str, hint: Any) -> Any:
    """Parse YAML text into dicts, lists and scalars, reading each scalar by `hint`.

    Args:
        text: one YAML document.
        hint: the expected type; a dataclass for a whole file. Nothing is validated here: a value that does not
            fit its type is returned as YAML reads it. Strings with `${` (interpolations) are returned as text.

    Raises:
        YamlError: invalid YAML, or a duplicate key.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise YamlError(f"not valid YAML: {_without_excerpt(error)}") from None
    except RecursionError:
        raise YamlError(_TOO_DEEP) from None
    return None if node is None else _construct(node, hint, _MAX_DEPTH, iter(range(_MAX_VALUES)))


def _without_excerpt(error: yaml.YAMLError) -> str:
    """PyYAML's message and the place, without the text there: it may begin in the middle of a password."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    parts = []
    for text, mark in ((error.context, error.context_mark), (error.problem, error.problem_mark)):
        parts += [f"{text}{_place(mark)}"] if text else []
    return ", ".join(parts)


def dump(tree: Any) -> str:
    """Write a tree of dicts, lists and scalars so that `parse_typed` round-trips it."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def _construct(node: yaml.Node, hint: Any, depth: int, budget: Iterator[int]) -> Any:
    """`budget` ends where aliases of aliases would fill the memory."""
    kind = node.tag.removeprefix(_TAG)
    if kind not in (*_KINDS, "str", "seq", "map"):
        raise YamlError(f"the tag {node.tag!r} is not supported{_place(node.start_mark)}; write the value without it")
    if depth == 0 or next(budget, None) is None:
        raise YamlError(_TOO_DEEP + _place(node.start_mark))
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, kind, hint)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, inner_hint(hint, index), depth - 1, budget) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    out: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlError(f"a key that is not plain text{_place(key_node.start_mark)}")
        key = str(key_node.value)
        if key in out:
            raise YamlError(f"the key {key!r} is given twice{_place(key_node.start_mark)}")
        out[key] = _construct(value_node, inner_hint(hint, key), depth - 1, budget)
    return out


def _scalar(node: yaml.ScalarNode, kind: str, hint: Any) -> Any:
    text = str(node.value)
    if node.style is not None or kind not in _KINDS or "${" in text:
        return text
    if not _KINDS[kind].match(text):
        raise YamlError(f"{text!r} is no {kind}{_place(node.start_mark)}; write it without the tag !!{kind}")
    if kind == "null":
        return None
    if hint is not None and wants_text(item_hint(hint) or hint):
        return text
    if kind == "bool":
        return text.lower() == "true"
    if text.lstrip("+-").startswith(("0x", "0o")):
        return int(text, 0)
    if kind == "int" and len(text) <= _MAX_DIGITS:
        return int(text)
    return float(re.sub(r"\.(?=[inIN])", "", text))


def _place(mark: Any) -> str:
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
