"""Which keys several configurations do not share. Pure."""

from collections.abc import Mapping
from typing import Any

_FIXED_KEYS = ("trainer.experiment", "trainer.output_dir")
"""Keys that name a run and do not change what it computes."""


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """The values of a parsed config.yaml as text, by dotted key; a list is one value."""
    if not isinstance(tree, dict):
        return {prefix: str(tree)}
    return {
        path: value
        for key, inner in tree.items()
        for path, value in flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def differing(trees: Mapping[str, Any]) -> dict[str, list[str]]:
    """Dotted key -> its value in each configuration, empty where it has none, for the keys that differ.

    Args:
        trees: label -> parsed config.yaml. The keys come in the order of the first configuration that has them.
    """
    flat = [flatten(tree or {}) for tree in trees.values()]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in _FIXED_KEYS]
    found = {key: [one.get(key, "") for one in flat] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}
