"""Names, dtypes and tensors of a Hugging Face model folder, one tensor in memory at a time.

transformers fuses some tensors while it loads a folder (the experts of a mixture); its own conversion, the one of
`save_pretrained`, cuts them apart again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExportError
from ..hf_export import DTYPE_NAMES

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {code: name for name, code in DTYPE_NAMES.items()}


class ModelFolder:
    """A model folder, which may lack weights. Reads only safetensors."""

    def __init__(self, folder: Path) -> None:
        """Raises ExportError for a torn or foreign file."""
        self._folder, self._files = folder, sorted(folder.glob("*.safetensors"))
        self._dtypes = {name: file.get_slice(name).get_dtype() for file, name in self._entries()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all weights. Raises ExportError if there are none."""
        if not self._files:
            raise ExportError("has no safetensors file", field="base", value=str(self._folder))
        for file, name in self._entries():
            yield name, file.get_tensor(name)

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the folder that the model's tensor `name` holds."""
        if name in self._dtypes or (model := self._meta_model) is None:
            yield name, tensor
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(model, {name: tensor}).items()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of the folder, or else of config.json."""
        import torch

        stored = self._dtypes.get(name)
        dtype: torch.dtype = getattr(torch, self._config_dtype if stored is None else _TORCH_NAMES[stored])
        return dtype

    def _entries(self) -> Iterator[tuple[Any, str]]:
        """(open file, name) of each tensor."""
        from safetensors import SafetensorError, safe_open

        for path in self._files:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ExportError(f"cannot be read: {error}", field="model_files_from", value=str(path)) from error
            with file:
                for name in list(file.keys()):
                    yield file, name

    @cached_property
    def _config_dtype(self) -> str:
        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        stated = config.get("dtype") or config.get("torch_dtype")
        if stated not in DTYPE_NAMES:
            raise ExportError(
                f"{self._folder} has no weights and states no dtype in config.json",
                field="dtype",
                value=None,
                remedy="pass a dtype (--dtype)",
            )
        return str(stated)

    @cached_property
    def _meta_model(self) -> Any | None:
        """The model without memory; None, with a warning, where transformers cannot build it."""
        try:
            import torch
            import transformers
            from transformers.core_model_loading import revert_weight_conversion  # noqa: F401

            config = transformers.AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
            first = str(error).splitlines()[0]
            warnings.warn(f"{self._folder}: tensors keep the checkpoint's names: {first}", stacklevel=2)
            return None
