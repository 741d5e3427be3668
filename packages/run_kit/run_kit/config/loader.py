"""Config loader: merges dataclass defaults, YAML files and dotted overrides, then validates the result.

Merge order, later wins: the defaults of the dataclass, each YAML file left to right, each `a.b=value` left to
right. OmegaConf resolves `${other.key}`; pydantic validates. One `ConfigError` reports every
problem.
"""

import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from ..errors import ConfigError, ConfigProblem
from .schema import (
    MISSING,
    accepts_text,
    allowed_words,
    alternatives,
    choices,
    current_key,
    field_default,
    field_hints,
    inner_hint,
    item_hint,
    nearest_paths,
    section_class,
    value_hint,
    wants_text,
)
from .yaml import YamlError, dump, parse_typed

ConfigT = TypeVar("ConfigT")

_BASE = "base"
"""Top-level key of a YAML file: the path of the file it extends."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One source of values: a file or one override."""

    source: str
    tree: dict[str, Any]


def load_config(cls: type[ConfigT], *, presets: Sequence[Path | str] = (), overrides: Sequence[str] = ()) -> ConfigT:
    """Build a config from its defaults, YAML files and dotted overrides.

    Args:
        cls: a frozen keyword-only dataclass of plain types and nested dataclasses of the same kind.
        presets: YAML files, merged left to right; a file with a `base` is merged after the file that it names.
        overrides: `dotted.key=value` texts, merged after the files. The value is YAML read by the key's type: text
            needs no quotes, `[a, b]` is a list, one value alone stands for a list of one, `null` or `None` is null.

    Raises:
        ConfigError: unreadable file, unknown key, missing or invalid value; reports all of them at once.

    Warns:
        DeprecationWarning: a key under its old name (`RENAMED_KEYS` of its config class).
    """
    problems: list[ConfigProblem] = []
    layers = [layer for path in presets for layer in _file_layers(cls, Path(path), problems)]
    layers += [layer for text in overrides if (layer := _override_layer(cls, text, problems)) is not None]
    layers = [_Layer(source=x.source, tree=_known_part(cls, x.tree, cls, "", x.source, problems)) for x in layers]
    tree = _merge(cls, layers, problems)
    if tree is None:
        raise ConfigError(problems)
    return _validate(cls, tree, layers, problems)


def given_keys(cls: type, files: Sequence[Path]) -> set[str]:
    """The dotted keys that YAML files give, with those of the files they are based on; unreadable files give none."""
    layers = [layer for path in files for layer in _file_layers(cls, path, [])]
    return {path.partition("[")[0] for layer in layers for path, _ in _leaves(layer.tree)}


def to_yaml(config: Any) -> str:
    """Write a config as YAML with every key; `load_config` of that file gives an equal config."""
    return dump(plain_tree(config))


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


def _file_layers(cls: type, path: Path, problems: list[ConfigProblem], below: tuple[Path, ...] = ()) -> list[_Layer]:
    """A file's values, after those of its `base: other.yaml` (a path relative to its own folder)."""
    source = str(path)
    try:
        tree = parse_typed(path.read_text(encoding="utf-8"), cls)
    except OSError as error:
        problems.append(ConfigProblem(path="", message=f"cannot read the file {path}: {error.strerror or error}"))
        return []
    except ValueError as error:  # YamlError, bytes that are not UTF-8, a path that no system call takes
        problems.append(ConfigProblem(path="", message=str(error), source=source))
        return []
    if tree is None:
        return []
    if not isinstance(tree, dict):
        message = f"expected a mapping of keys at the top of the file, got {_short(tree)}"
        problems.append(ConfigProblem(path="", message=message, source=source))
        return []
    layers = [_Layer(source=source, tree=tree)]
    if _BASE in tree and _BASE not in field_hints(cls):
        base, below = tree.pop(_BASE), (*below, path.resolve())
        if isinstance(base, str) and (file := (path.parent / base).resolve()) not in below:
            return [*_file_layers(cls, file, problems, below), *layers]
        allowed = f"the path of another file, not of {path.name} itself or one that is based on it"
        problems.append(ConfigProblem(path=_BASE, message=f"got {_short(base)}; allowed: {allowed}", source=source))
    return layers


def _override_layer(cls: type, text: str, problems: list[ConfigProblem]) -> _Layer | None:
    path, equals, raw = text.partition("=")
    words = path.split(".")
    if not equals or not all(words):
        message = f"{_short(text)} is not an override; write key=value with a dotted key, as in a.b=1"
        problems.append(ConfigProblem(path="", message=message, source="command line"))
        return None
    try:
        value: Any = "" if raw == "" else _parse_override(raw, functools.reduce(inner_hint, words, cast("Any", cls)))
    except YamlError as error:
        problems.append(ConfigProblem(path=path, message=str(error), source="command line"))
        return None
    for word in reversed(words):
        value = {word: value}
    return _Layer(source="command line", tree=value)


def _parse_override(raw: str, hint: Any) -> Any:
    if hint is not None and wants_text(hint) and raw[0] not in "\"'":
        # Take text as typed ("Answer: yes #1" is not plain text in YAML), but null stays null where allowed.
        return None if alternatives(hint)[1] and raw in ("null", "None", "~") else raw
    if hint is not None and raw[0] not in "[\"'" and (item := item_hint(hint)) is not None and wants_text(item):
        return None if raw in ("null", "None", "~") else raw
    return parse_typed(raw, hint)


def _known_part(root: type, value: Any, hint: Any, path: str, source: str, problems: list[ConfigProblem]) -> Any:
    """The part of a layer with known keys; unknown keys become problems."""
    nested = section_class(hint)
    if (
        nested is not None
        and not isinstance(value, dict)
        and not _is_interpolation(value)
        and (value is not None or not alternatives(hint)[1])
    ):
        problems.append(
            ConfigProblem(path=path, message=f"got {_short(value)}; allowed: {allowed_words(hint)}", source=source)
        )
        return MISSING
    if isinstance(value, list):
        return [
            known
            for i, item in enumerate(value)
            if (known := _known_part(root, item, inner_hint(hint, i), f"{path}[{i}]", source, problems)) is not MISSING
        ]
    if not isinstance(value, dict) or hint is None:
        return value
    if nested is None:
        if (item_type := value_hint(hint)) is not None:
            return {
                key: known
                for key, item in value.items()
                if (known := _known_part(root, item, item_type, f"{path}.{key}", source, problems)) is not MISSING
            }
        if Any not in alternatives(hint)[0]:
            inner = next(iter(value), "")
            message = f"unknown key; {path} is a value ({allowed_words(hint)}), not a section"
            problems.append(ConfigProblem(path=f"{path}.{inner}", message=message, source=source))
            return MISSING
        return value
    out = {}
    for given, inner in value.items():
        key = current_key(nested, given)
        inner_path = f"{path}.{key}" if path else key
        if key != given:
            old_path = f"{path}.{given}" if path else given
            if key in value:
                message = f"given twice: {old_path} is its old name; give one of them"
                problems.append(ConfigProblem(path=inner_path, message=message, source=source))
                continue
            warnings.warn(
                f"{old_path} is deprecated: write {inner_path} (from {source})", DeprecationWarning, stacklevel=2
            )
        if key not in field_hints(nested):
            near = nearest_paths(root, inner_path)
            message = f"unknown key (given {_short(inner)}); " + (
                f"nearest: {', '.join(near)}" if near else f"allowed here: {', '.join(field_hints(nested))}"
            )
            problems.append(ConfigProblem(path=inner_path, message=message, source=source))
        elif (known := _known_part(root, inner, field_hints(nested)[key], inner_path, source, problems)) is not MISSING:
            out[key] = known
    return out


def _merge(cls: type, layers: Sequence[_Layer], problems: list[ConfigProblem]) -> dict[str, Any] | None:
    """Defaults and layers merged, interpolations resolved; None (and a problem) if an interpolation fails."""
    given: Any = {}
    for layer in layers:
        given = _overlaid(given, layer.tree)
    tree = _overlaid(_default_tree(cls, given), given)
    if any(_is_interpolation(leaf) for _, leaf in _leaves(given)):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            resolved = OmegaConf.to_container(OmegaConf.create(_replace_text(tree, *_MISSING_MARK)), resolve=True)
        except OmegaConfBaseException as error:
            path = str(getattr(error, "full_key", "") or "").removesuffix(f".{_COPIED}")
            value = _at(given, path)
            first_line = str(error).strip().splitlines()[0]
            shown = f"cannot resolve {_short(value)}: " if value is not MISSING else ""
            problems.append(ConfigProblem(path=path, message=f"{shown}{first_line}", source=_source_of(layers, path)))
            return None
        tree = _with_copies(_replace_text(resolved, *reversed(_MISSING_MARK)))
    normal = _normalize(tree, cls)
    assert isinstance(normal, dict)
    return normal


_COPIED = "\ue000copied"
"""Key of the interpolation that a section is a copy of, beside the keys that later layers change in it."""


def _overlaid(below: Any, above: Any) -> Any:
    """`above` over `below`: sections merge, any other value replaces."""
    if not isinstance(above, dict):
        return above
    if _is_interpolation(below):
        below = {_COPIED: below}
    below = below if isinstance(below, dict) else {}
    return {**below, **{key: _overlaid(below.get(key), value) for key, value in above.items()}}


def _with_copies(tree: Any) -> Any:
    """A resolved tree in which each section with `_COPIED` has the keys of that section below its own."""
    if not isinstance(tree, dict):
        return tree
    own = {key: _with_copies(value) for key, value in tree.items() if key != _COPIED}
    return _overlaid(_with_copies(tree[_COPIED]), own) if _COPIED in tree else own


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a tree that is no mapping and no list."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}".removeprefix("."))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


# OmegaConf reads the text ??? as a missing value; here it is ordinary text, so it is masked while resolving.
_MISSING_MARK = ("???", "\ue000???")


def _replace_text(tree: Any, old: str, new: str) -> Any:
    """A copy of a tree with every string equal to `old` replaced."""
    if isinstance(tree, dict):
        return {key: _replace_text(value, old, new) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replace_text(value, old, new) for value in tree]
    return new if tree == old else tree


def _default_tree(cls: type, given: Any, instance: Any = None) -> dict[str, Any]:
    """Defaults of a config class or of `instance`; a given key switches on the defaults of an optional section."""
    tree: dict[str, Any] = {}
    for name, hint in field_hints(cls).items():
        default = field_default(cls, name) if instance is None else getattr(instance, name)
        nested, user = section_class(hint), given.get(name) if isinstance(given, dict) else None
        if isinstance(user, dict) and _COPIED in user:
            continue  # the copied section has a value for every key
        if nested is not None and default is not None and default is not MISSING:
            tree[name] = _default_tree(type(default), user, default)
        elif nested is not None and (isinstance(user, dict) or not alternatives(hint)[1]):
            tree[name] = _default_tree(nested, user)
        elif default is not MISSING:
            tree[name] = plain_tree(default)
    return tree


def _normalize(value: Any, hint: Any) -> Any:
    """Convert resolved values to their types: one value to a list, `1e3` to an integer, a number to text."""
    if isinstance(value, dict):
        return {key: _normalize(item, inner_hint(hint, key)) for key, item in value.items()}
    if hint is None or section_class(hint) is not None:
        return value
    if (item := item_hint(hint)) is not None:
        if isinstance(value, str) and value in choices(hint):  # a word for a whole list, such as "all"
            return value
        if isinstance(value, list):
            return [_normalize(inner, item_hint(hint, index)) for index, inner in enumerate(value)]
        return None if value is None else [_normalize(value, item)]
    return _normalize_scalar(value, hint)


def _normalize_scalar(value: Any, hint: Any) -> Any:
    if isinstance(value, str) and not accepts_text(hint):
        # Text for a number comes from quotes or from an interpolation such as ${oc.env:PORT}.
        try:
            value = parse_typed(value, hint)
        except YamlError:
            return value
    members, _ = alternatives(hint)
    if isinstance(value, float) and int in members and float not in members and value.is_integer():
        return int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and wants_text(hint):
        return str(value)
    return value


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _validate(cls: type[ConfigT], tree: Any, layers: Sequence[_Layer], problems: list[ConfigProblem]) -> ConfigT:
    from pydantic import ValidationError

    unusable = [
        ConfigProblem(path=path, message=f"got {_short(value)}; allowed: {allowed}", source=_source_of(layers, path))
        for path, value in _leaves(tree)
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


def _problem(cls: type, detail: Mapping[str, Any], tree: Any, layers: Sequence[_Layer]) -> ConfigProblem:
    missing = detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument")
    loc = detail["loc"]
    path, hint = _locate(cls, loc)
    if missing and path.endswith("]"):  # a fixed list that is too short
        missing, (path, hint) = False, _locate(cls, loc[:-1])
    source = _source_of(layers, path)
    if detail["type"] == "value_error":
        return _check_problem(path, hint, str(detail["ctx"]["error"]), layers)
    if missing:
        return ConfigProblem(path=path, message=f"missing; it has no default; allowed: {allowed_words(hint)}")
    value = _at(tree, path)
    allowed = allowed_words(hint)
    if not detail["type"].endswith(_CLEAR_FROM_THE_TYPE):
        allowed = f"{allowed} ({detail['msg']})"
    return ConfigProblem(path=path, message=f"got {_short(value)}; allowed: {allowed}", source=source)


def _check_problem(path: str, hint: Any, message: str, layers: Sequence[_Layer]) -> ConfigProblem:
    """A ValueError from `__post_init__`, whose message starts with the field's name by convention."""
    nested = section_class(hint)
    match = re.match(r"([A-Za-z_][\w.]*)(\s*[:=]\s*|\s+)", message)
    if nested is not None and match and match[1].partition(".")[0] in field_hints(nested):
        inner = f"{path}.{match[1]}" if path else match[1]
        rest = message[match.end() :]
        if match[2].strip() == "=":
            before = next((words for words in (" is not allowed: ", ": must ") if words in rest), ": ")
            after = {" is not allowed: ": "; allowed: "}.get(before, before.replace(":", ";"))
            rest = "got " + rest.replace(before, after, 1)
        return ConfigProblem(path=inner, message=rest, source=_source_of(layers, inner))
    return ConfigProblem(path=path, message=message)


def _locate(cls: type, loc: Sequence[int | str]) -> tuple[str, Any]:
    """Dotted path and type for pydantic's location, without its markers for union members."""
    hint: Any = cls
    path = ""
    for step in loc:
        if (inner := inner_hint(hint, step)) is None:
            break
        hint, path = inner, f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}".removeprefix(".")
    return path, hint


def _at(tree: Any, path: str) -> Any:
    """Value at a path, or MISSING."""
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(tree, dict) and step in tree:
            tree = tree[step]
        elif isinstance(tree, list) and step.isdecimal() and int(step) < len(tree):
            tree = tree[int(step)]
        else:
            return MISSING
    return tree


def _source_of(layers: Sequence[_Layer], path: str) -> str:
    """The last layer that set the key (or its section)."""
    key = path.partition("[")[0]
    return next((layer.source for layer in reversed(layers) if key and _at(layer.tree, key) is not MISSING), "")


def _short(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
