"""Configs of DeepSpeed and accelerate with the keys that public projects give them; written for the tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CONFIGS: Mapping[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    name: (one["config"], one["settings"], one["refused"])
    for name, one in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""Name -> config, some of the settings of EngineConfig that it gives, and the keys that are refused."""
