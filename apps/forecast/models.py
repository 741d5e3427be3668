"""Sizes of models: of a Hugging Face folder, or of a published configuration, without its weights."""

from typing import Any

from ds_engine import ModelShape
from ds_engine.planning.model_shape import FAMILIES
from rl_data import DataError, find_model_folder
from rl_runtime import InputError

_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Those that determine sizes, as in the models' published config.json."""
_SIZES: dict[str, tuple[str | int, ...]] = {
    "llama-3.1-8b": ("llama", 128256, 4096, 14336, 32, 32, 8),
    "llama-3.1-70b": ("llama", 128256, 8192, 28672, 80, 64, 8),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "qwen3-0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8),
}
PUBLISHED: dict[str, dict[str, Any]] = {name: dict(zip(_FIELDS, row, strict=True)) for name, row in _SIZES.items()}
PUBLISHED["qwen3-0.6b"] |= {"head_dim": 128, "tie_word_embeddings": True}


def model_shape(path: str, *, key: str = "model.path") -> ModelShape:
    """The sizes of a published configuration (a name in `PUBLISHED`), or of a Hugging Face folder.

    Raises:
        InputError: there is no such folder, or its architecture is none of the known families.
    """
    try:
        return ModelShape.read(PUBLISHED.get(path.lower()) or find_model_folder(path))
    except (DataError, ValueError) as error:
        names = ", ".join(PUBLISHED)
        allowed = f"a Hugging Face folder of {', '.join(FAMILIES)}, or one of {names}"
        raise InputError(f"{key} is {path}: {error}; allowed: {allowed}") from error
