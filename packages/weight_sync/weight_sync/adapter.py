"""LoRA adapters that are pushed without their base model, which the servers keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SyncConfigError

_SUFFIXES = ("lora_A.weight", "lora_B.weight")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Name and PEFT settings of the adapter whose tensors a pusher sends.

    The tensors carry PEFT's names (``base_model.model.….lora_A.weight``).
    """

    name: str
    """Model name that requests use; the server's own model name stays the base model's."""

    settings: Mapping[str, Any]
    """PEFT's adapter_config.json, JSON-serializable: ``r``, ``lora_alpha``, ``target_modules`` and further keys."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise SyncConfigError(f"adapter name: {self.name!r} given, must be a name without '/'")
        missing = {"r", "lora_alpha", "target_modules"} - set(self.settings)
        if missing:
            raise SyncConfigError(f"adapter settings: {', '.join(sorted(missing))} missing")

    @property
    def path(self) -> str:
        """The adapter's folder in vLLM's registry. No such folder exists: the worker holds the tensors in memory."""
        return f"/weight_sync/{self.name}"


def peft_name(name: str, adapter: str = "default") -> str | None:
    """Name of a PEFT model's parameter in PEFT's files; None for a parameter that is not part of the adapter.

    For ``ModuleSource(peft_model, rename=peft_name)``.
    """
    plain = name.replace(f".{adapter}.", ".")
    return plain if plain != name and plain.endswith(_SUFFIXES) else None
