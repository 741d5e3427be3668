"""PEFT's names and settings of LoRA adapters, without PEFT.

The parameter `q_proj.lora_A.default.weight` of an adapted model is `base_model.model.q_proj.lora_A.weight` in an
adapter's file, and the adapter adds scale * B @ A to a weight.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

PEFT_PREFIX = "base_model.model."
"""Start of every name in an adapter's file."""
ADAPTER_NAME = "default"
"""PEFT's name of an adapter that was given none."""

_SUFFIXES = ("lora_A.weight", "lora_B.weight")


def without_adapter(name: str, adapter: str = ADAPTER_NAME) -> str:
    """A parameter's name as in an adapter's file, without the prefix."""
    return name.replace(f".{adapter}.", ".")


def peft_name(name: str, adapter: str = ADAPTER_NAME) -> str | None:
    """Name of a PEFT model's parameter in PEFT's files; None for a parameter that is not part of the adapter."""
    plain = without_adapter(name, adapter)
    return plain if plain != name and plain.endswith(_SUFFIXES) else None


def missing_settings(settings: Mapping[str, Any]) -> list[str]:
    """Keys that an adapter_config.json needs and `settings` lacks."""
    return [key for key in ("r", "lora_alpha", "target_modules") if settings.get(key) is None]


def lora_scale(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """The factor of B @ A in a layer; as in PEFT, a pattern matches the end of a layer's name."""
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else float(rank))
