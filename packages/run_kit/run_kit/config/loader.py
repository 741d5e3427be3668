"""Config loader: merges dataclass defaults, YAML files and dotted overrides, then validates the result.

Merge order, later wins: the defaults of the dataclass, each YAML file left to right, each `a.b=value` left to
right. OmegaConf resolves `${other.key}`; `validation` validates with pydantic. One `ConfigError` reports every problem.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from plinth_base.errors import shown

from ..errors import ConfigError
from .schema import (
    MISSING,
    accepts_text,
    allowed_words,
    alternatives,
    choices,
    field_default,
    field_hints,
    inner_hint,
    item_hint,
    nearest_paths,
    section_class,
    value_hint,
    wants_text,
)
from .trees import Layer, leaves, plain_tree, source_of, value_at
from .validation import validate
from .yaml import YamlError, dump, parse_typed

ConfigT = TypeVar("ConfigT")

_BASE = "base"
"""Top-level key of a YAML file: the path of the file it extends."""


def load_config(
    cls: type[ConfigT], *, presets: Sequence[Path | str | Layer] = (), overrides: Sequence[str] = ()
) -> ConfigT:
    """Build a config from its defaults, YAML files and dotted overrides.

    Args:
        cls: a frozen keyword-only dataclass of plain types and nested dataclasses of the same kind.
        presets: YAML files, merged left to right; a file with a `base` is merged after the file that it names. A Layer
            stands for the contents of a file.
        overrides: `dotted.key=value` texts, merged after the files. The value is YAML read by the key's type: text
            needs no quotes, `[a, b]` is a list, one value alone stands for a list of one, `null` or `None` is null.

    Raises:
        ConfigError: unreadable file, unknown key, missing or invalid value; reports all of them at once.
    """
    problems: list[ConfigError] = []
    layers: list[Layer] = []
    for preset in presets:
        layers += [preset] if isinstance(preset, Layer) else _file_layers(cls, Path(preset), problems)
    layers += [layer for text in overrides if (layer := _override_layer(cls, text, problems)) is not None]
    layers = [_known_part(cls, layer, problems) for layer in layers]
    tree = _merge(cls, layers, problems)
    if tree is None:
        raise ConfigError.of(problems)
    return validate(cls, tree, layers, problems)


def given_values(cls: type, files: Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Values in YAML files, the files they are based on, and overrides, by dotted key; of a list the last value.

    Unreadable files and overrides give none.
    """
    layers = [layer for path in files for layer in _file_layers(cls, path, [])]
    layers += [layer for text in overrides if (layer := _override_layer(cls, text, [])) is not None]
    return {path.partition("[")[0]: value for layer in layers for path, value in leaves(layer.tree)}


def to_yaml(config: Any) -> str:
    """Write a config as YAML with every key; `load_config` of that file gives an equal config."""
    return dump(plain_tree(config))


def _file_layers(cls: type, path: Path, problems: list[ConfigError], below: tuple[Path, ...] = ()) -> list[Layer]:
    """A file's values, after those of its `base: other.yaml` (a path relative to its own folder)."""
    source = str(path)
    try:
        tree = parse_typed(path.read_text(encoding="utf-8"), cls)
    except OSError as error:
        problems.append(ConfigError(f"cannot read the file {path}: {error.strerror or error}"))
        return []
    except ValueError as error:  # YamlError, bytes that are not UTF-8, a path that no system call takes
        problems.append(ConfigError(str(error), source=source))
        return []
    if tree is None:
        return []
    if not isinstance(tree, dict):
        message = f"expected a mapping of keys at the top of the file, got {shown(tree)}"
        problems.append(ConfigError(message, source=source))
        return []
    layers = [Layer(source=source, tree=tree)]
    if _BASE in tree and _BASE not in field_hints(cls):
        base, below = tree.pop(_BASE), (*below, path.resolve())
        if isinstance(base, str) and (file := (path.parent / base).resolve()) not in below:
            return [*_file_layers(cls, file, problems, below), *layers]
        allowed = f"the path of another file, not of {path.name} itself or one that is based on it"
        problems.append(ConfigError(field=_BASE, value=base, allowed=allowed, source=source))
    return layers


def _override_layer(cls: type, text: str, problems: list[ConfigError]) -> Layer | None:
    path, equals, raw = text.partition("=")
    words = path.split(".")
    if not equals or not all(words):
        message = f"{shown(text)} is not an override; write key=value with a dotted key, as in a.b=1"
        problems.append(ConfigError(message, source="command line"))
        return None
    try:
        value: Any = "" if raw == "" else _parse_override(raw, functools.reduce(inner_hint, words, cast("Any", cls)))
    except YamlError as error:
        problems.append(ConfigError(str(error), field=path, source="command line"))
        return None
    for word in reversed(words):
        value = {word: value}
    return Layer(source="command line", tree=value)


def _parse_override(raw: str, hint: Any) -> Any:
    if hint is not None and wants_text(hint) and raw[0] not in "\"'":
        # Take text as typed ("Answer: yes #1" is not plain text in YAML), but null stays null where allowed.
        return None if alternatives(hint)[1] and raw in ("null", "None", "~") else raw
    if hint is not None and raw[0] not in "[\"'" and (item := item_hint(hint)) is not None and wants_text(item):
        return None if raw in ("null", "None", "~") else raw
    return parse_typed(raw, hint)


def _known_part(root: type, layer: Layer, problems: list[ConfigError]) -> Layer:
    """The part of a layer with known keys; unknown keys become problems."""

    def refuse(problem: str = "", **fields: Any) -> Any:
        problems.append(ConfigError(problem, source=layer.source, **fields))
        return MISSING

    def known(value: Any, hint: Any, path: str) -> Any:
        nested, is_null = section_class(hint), value is None and alternatives(hint)[1]
        if nested is not None and not (isinstance(value, dict) or _is_interpolation(value) or is_null):
            return refuse(field=path, value=value, allowed=allowed_words(hint))
        if isinstance(value, list):
            parts = [known(item, inner_hint(hint, i), f"{path}[{i}]") for i, item in enumerate(value)]
            return [part for part in parts if part is not MISSING]
        if not isinstance(value, dict) or hint is None:
            return value
        if nested is None and value_hint(hint) is None:
            if Any in alternatives(hint)[0]:
                return value
            message = f"unknown key; {path} is a value ({allowed_words(hint)}), not a section"
            return refuse(message, field=f"{path}.{next(iter(value), '')}")
        out = {}
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else key
            if nested is None or key in field_hints(nested):
                out[key] = known(inner, inner_hint(hint, key), inner_path)
                continue
            for unknown, leaf in leaves(inner, inner_path):
                near = nearest_paths(root, unknown.partition("[")[0])
                remedy = f"nearest: {', '.join(near)}" if near else f"allowed here: {', '.join(field_hints(nested))}"
                refuse(f"unknown key (given {shown(leaf)})", field=unknown, remedy=remedy)
        return {key: inner for key, inner in out.items() if inner is not MISSING}

    return Layer(source=layer.source, tree=known(layer.tree, root, ""))


def _merge(cls: type, layers: Sequence[Layer], problems: list[ConfigError]) -> dict[str, Any] | None:
    """Defaults and layers merged, interpolations resolved; None (and a problem) if an interpolation fails."""
    given: Any = {}
    for layer in layers:
        given = _overlaid(given, layer.tree)
    tree = _overlaid(_default_tree(cls, given), given)
    if any(_is_interpolation(leaf) for _, leaf in leaves(given)):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            resolved = OmegaConf.to_container(OmegaConf.create(_replace_text(tree, *_MISSING_MARK)), resolve=True)
        except OmegaConfBaseException as error:
            path = str(getattr(error, "full_key", "") or "").removesuffix(f".{_COPIED}")
            value = value_at(given, path)
            first_line = str(error).strip().splitlines()[0]
            cause = f"cannot resolve {shown(value)}: " if value is not MISSING else ""
            problems.append(ConfigError(f"{cause}{first_line}", field=path, source=source_of(layers, path)))
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
