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

from plinth_base.model_folder import ModelFolderError, read_safetensors_header, stored_tensors, weight_files

from ..errors import ExportError
from ..tensor_file import DTYPE_NAMES

if TYPE_CHECKING:
    import torch


def read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights of a model folder. Raises ExportError if there are none, or a file is damaged."""
    from safetensors import safe_open

    try:
        files = {file: read_safetensors_header(file) for file in weight_files(folder) if file.suffix == ".safetensors"}
    except ModelFolderError as error:
        raise _export_error(error) from error
    if not files:
        raise ExportError("has no safetensors file", field="base", value=str(folder))
    for path, header in files.items():
        with safe_open(path, framework="pt") as file:
            for name in header:
                yield name, file.get_tensor(name)


class ModelFolder:
    """A model folder, which may lack weights. Reads only safetensors, and only the files that transformers reads."""

    def __init__(self, folder: Path) -> None:
        """Raises ExportError for a torn or foreign file."""
        self._folder = folder
        try:
            self._dtypes = {name: stored.dtype for name, stored in stored_tensors(folder).items()}
        except ModelFolderError as error:
            raise _export_error(error) from error

    @property
    def tied(self) -> dict[str, str]:
        """Tensors that the folder lacks, and the one that the model uses in their place."""
        tied: dict[str, str] = getattr(self._meta_model, "all_tied_weights_keys", {})
        return {name: source for name, source in tied.items() if name not in self._dtypes}

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the folder that the model's tensor `name` holds. Raises ExportError if it has none."""
        parts = {name: tensor}
        if name not in self._dtypes and (model := self._meta_model) is not None:
            from transformers.core_model_loading import revert_weight_conversion

            parts = revert_weight_conversion(model, parts)
        for part_name, part in parts.items():
            if self._dtypes and part_name not in self._dtypes and part_name not in self.tied:
                remedy = "give the folder of the model that was trained, and its --tag"
                raise ExportError("has no such tensor", field="model_files_from", value=part_name, remedy=remedy)
            yield part_name, part

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of the folder, or else of config.json."""
        import torch

        dtype: torch.dtype = getattr(torch, self._dtypes.get(name) or self._config_dtype)
        return dtype

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


def _export_error(error: ModelFolderError) -> ExportError:
    return ExportError(error.problem, field="model_files_from", value=error.value, remedy=error.remedy)
