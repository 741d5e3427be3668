"""Checks the model folder that servers load, and its context length."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plinth_base import ModelFolderError, check_model_folder, read_model_config, weight_files
from plinth_base.model_folder import MATCHED, files_of_index

from ..config import RolloutConfig
from ..errors import RequestTooLongError, RolloutConfigError


def check_folder(model_path: str, *, load_format: str = "auto") -> dict[str, Any] | None:
    """The config.json of a checked folder. None: `model_path` is a model on the Hub, which is not checked.

    Raises ModelFolderError: the folder does not exist, has no valid config.json, no tokenizer or no weights, or vLLM
    would load weight files that are not part of the model.
    """
    try:
        folder = Path(model_path).expanduser()
        exists = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody, a zero byte, a name that is too long
        raise ModelFolderError(f"the path cannot be read: {error}", value=model_path) from None
    if not exists and model_path.count("/") == 1 and model_path[0] not in "./~":
        return None
    check_model_folder(folder if model_path else "", need_weights=load_format != "dummy")
    if load_format != "dummy":
        _check_same_weights(folder)
    return read_model_config(folder)


def _check_same_weights(folder: Path) -> None:
    """Refuse a folder from which vLLM loads other files than transformers, and so the trainer."""
    index = folder / "model.safetensors.index.json"
    loaded = set(files_of_index(index) if index.is_file() else folder.glob("*.safetensors"))
    if strays := sorted(path.name for path in loaded - set(weight_files(folder))):
        problem = f"vLLM would load {', '.join(strays[:3])}, from which the trainer does not read the model"
        raise ModelFolderError(problem, value=str(folder), remedy="move what is not the model out of the folder")


def check_match(config: RolloutConfig, model_config: Mapping[str, Any]) -> None:
    """Check that match_trainer has the model's layers. Raises RolloutConfigError."""
    rope = model_config.get("rope_parameters") or model_config.get("rope_scaling") or {}
    model = {**model_config, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
    for name, known in (*MATCHED.items(), ("use_sliding_window", (None, False))):
        if config.match_trainer and model_config and model.get(name) not in known:
            raise RolloutConfigError(
                f"its model has {name} {model.get(name)}",
                field="match_trainer",
                value=True,
                allowed=f"false but for {name} {' or '.join(map(str, known))}",
            )


def check_context(config: RolloutConfig, model_config: Mapping[str, Any] | None) -> None:
    """Check that max_model_len is within the model's context. Raises RequestTooLongError."""
    limit = (model_config or {}).get("max_position_embeddings")
    if config.max_model_len is None or not isinstance(limit, int) or (model_config or {}).get("rope_scaling"):
        return
    if config.max_model_len > limit:
        raise RequestTooLongError(
            field="max_model_len",
            value=config.max_model_len,
            allowed=f"at most the model's context of {limit} tokens (max_position_embeddings)",
        )
