"""Names, dtypes and tensors of a Hugging Face model folder, one tensor in memory at a time.

transformers fuses some tensors while it loads a folder (the experts of a mixture); its own conversion, the one of
`save_pretrained`, cuts them apart again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plinth_base.model_folder import ModelFolderError, safetensors_headers, stored_tensors

from ..errors import ExportError
from ..tensor_file import DTYPE_NAMES

if TYPE_CHECKING:
    import torch


def read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights of a model folder. Raises ExportError if there are none, or a file is damaged."""
    from safetensors import safe_open

    try:
        files = safetensors_headers(folder)
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
            self._stored = stored_tensors(folder)
        except ModelFolderError as error:
            raise _export_error(error) from error

    @property
    def tied(self) -> dict[str, str]:
        """Tensors that the folder lacks, and the one that the model uses in their place."""
        tied: dict[str, str] = getattr(self._meta_model, "all_tied_weights_keys", {})
        return {name: source for name, source in tied.items() if name not in self._stored}

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the folder that the model's tensor `name` holds. Raises ExportError if it has none, or one of
        another shape."""
        parts = {name: tensor}
        if name not in self._stored and (model := self._meta_model) is not None:
            from transformers.core_model_loading import revert_weight_conversion

            parts = revert_weight_conversion(model, parts)
        for part_name, part in parts.items():
            if self._stored and part_name not in self._stored and part_name not in self.tied:
                raise _foreign("has no such tensor", part_name)
            if part_name in self._stored and (shape := self._stored[part_name].shape) != tuple(part.shape):
                raise _foreign(f"it has shape {list(shape)}, in the checkpoint {list(part.shape)}", part_name)
            yield part_name, part

    def frozen_vision(self, written: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The folder's tensors of a vision tower that are not among the written ones: a checkpoint lacks it if it was
        not trained."""
        backbone = getattr(self._meta_model, "model", None)
        text = getattr(backbone, "language_model", None) or getattr(backbone, "text_model", None)
        if text is None or not hasattr(backbone, "get_image_features") or not self._stored:
            return
        from transformers.core_model_loading import revert_weight_conversion

        model: Any = self._meta_model
        of_text = {id(p) for part in (text, model.get_output_embeddings()) for p in part.parameters()}
        tower = {name: p for name, p in model.named_parameters() if id(p) not in of_text}
        left = revert_weight_conversion(model, tower).keys() - set(written)
        if left:
            yield from ((name, tensor) for name, tensor in read_folder(self._folder) if name in left)

    def check_complete(self, written: Collection[str]) -> None:
        """Raises ExportError for a weight of the folder's model that is not among the written tensors."""
        if not (left := self._stored.keys() - set(written)) or (model := self._meta_model) is None:
            return
        tied = getattr(model, "all_tied_weights_keys", {})
        missing = sorted((left & model.state_dict().keys()) - tied.keys() - set(tied.values()))
        if missing:
            raise _foreign(f"the checkpoint lacks it, and {len(missing) - 1} other weights", missing[0])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of the folder, or else of config.json."""
        import torch

        dtype: torch.dtype = getattr(torch, self._stored[name].dtype if name in self._stored else self._config_dtype)
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
                is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
                kind = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
                return kind.from_config(config, trust_remote_code=False)
        except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
            first = str(error).splitlines()[0]
            warnings.warn(f"{self._folder}: tensors keep the checkpoint's names: {first}", stacklevel=2)
            return None


def _export_error(error: ModelFolderError) -> ExportError:
    return ExportError(error.problem, field="model_files_from", value=error.value, remedy=error.remedy)


def _foreign(problem: str, name: str) -> ExportError:
    remedy = "give the folder of the model that was trained, and its --tag"
    return ExportError(problem, field="model_files_from", value=name, remedy=remedy)
