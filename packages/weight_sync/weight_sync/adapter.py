"""LoRA adapters that are pushed without their base model, which the servers keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plinth_base.adapters import missing_settings
from plinth_base.adapters import peft_name as peft_name

from .errors import SyncConfigError


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
            raise SyncConfigError(field="name", value=self.name, allowed="a name without '/'")
        if missing := missing_settings(self.settings):
            raise SyncConfigError(f"{', '.join(missing)} missing", field="settings")

    @property
    def path(self) -> str:
        """The adapter's folder in vLLM's registry. No such folder exists: the worker holds the tensors in memory."""
        return f"/weight_sync/{self.name}"
