"""Keys whose values differ between configurations. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .help import default_text
from .yaml import YamlError, parse_typed

_FIXED_KEYS = ("trainer.experiment", "trainer.output_dir")
"""Keys that name a run and do not change what it computes."""


def flatten(tree: Any, prefix: str = "", text: Callable[[Any], str] = str) -> dict[str, str]:
    """The values of a parsed config.yaml as text, by dotted key; a list is one value."""
    if not isinstance(tree, dict):
        return {prefix: text(tree)}
    return {
        path: value
        for key, inner in tree.items()
        for path, value in flatten(inner, f"{prefix}.{key}" if prefix else str(key), text).items()
    }


def config_differences(config_texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Dotted key -> its value in each run as in an override, empty where it has none, for the keys that differ.

    Args:
        config_texts: label -> text of the run's config.yaml. Keys come in the order of the first run that has them.

    Raises:
        ConfigError: a text that is no configuration; names the run.
    """
    flat = []
    for label, text in config_texts.items():
        try:
            flat.append(flatten(parse_typed(text, None) or {}, text=default_text))
        except YamlError as error:
            raise ConfigError(f"config.yaml of {label}: {error}") from None
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in _FIXED_KEYS]
    values = {key: [one.get(key, "") for one in flat] for key in keys}
    return {key: own for key, own in values.items() if len(set(own)) > 1}
