"""Sizes of models: of a Hugging Face folder, or of a published configuration, without its weights."""

from typing import Any

from ds_engine import ModelShape
from ds_engine.planning.model_shape import FAMILIES
from rl_data import DataError, find_model_folder
from rl_runtime import InputError

# Fields that determine sizes, as in the models' published config.json.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3.1-70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}


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
