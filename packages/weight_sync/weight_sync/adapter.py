"""A LoRA adapter that is pushed alone, beside a base model that the servers keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SyncConfigError

_SUFFIXES = ("lora_A.weight", "lora_B.weight")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Which adapter a pusher's tensors are. They carry PEFT's names (``base_model.model.….lora_A.weight``)."""

    name: str
    """The model name by which requests ask for it; the servers' own model name stays the base model's."""

    settings: Mapping[str, Any]
    """PEFT's adapter_config.json: ``r``, ``lora_alpha``, ``target_modules`` and what else it holds, JSON-able."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise SyncConfigError(f"adapter name: {self.name!r} given, allowed is a name without '/'")
        missing = {"r", "lora_alpha", "target_modules"} - set(self.settings)
        if missing:
            raise SyncConfigError(f"adapter settings: {', '.join(sorted(missing))} missing")

    @property
    def path(self) -> str:
        """What stands for the adapter's folder in vLLM's registry; no such folder exists."""
        return f"/weight_sync/{self.name}"


def peft_name(name: str, adapter: str = "default") -> str | None:
    """A PEFT model's parameter name as PEFT's files have it; None for a parameter that is not of the adapter.

    For ``ModuleSource(peft_model, rename=peft_name)``.
    """
    plain = name.replace(f".{adapter}.", ".")
    return plain if plain != name and plain.endswith(_SUFFIXES) else None
