"""Prompts, tokenization, scoring functions, and a built-in arithmetic task with a tiny model, for RL of LLMs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arithmetic import ArithmeticTask, write_task
    from .config import DataConfig, RewardConfig
    from .demonstrations import Demonstration, check_demonstrations, load_demonstrations
    from .errors import DataError, ModelFolderError, RlDataError, SamplerStateError, UnknownDataSourceError
    from .parquet import check_files
    from .prompts import Prompt, load_prompts
    from .sampler import PromptSampler
    from .scoring import RewardFn, gsm8k_score, register_reward, reward_for
    from .tiny_model import build_tiny_model
    from .tokenizer import check_model_folder, find_model_folder, load_tokenizer

__all__ = [
    "ArithmeticTask",
    "DataConfig",
    "DataError",
    "Demonstration",
    "ModelFolderError",
    "Prompt",
    "PromptSampler",
    "RewardConfig",
    "RewardFn",
    "RlDataError",
    "SamplerStateError",
    "UnknownDataSourceError",
    "build_tiny_model",
    "check_demonstrations",
    "check_files",
    "check_model_folder",
    "find_model_folder",
    "gsm8k_score",
    "load_demonstrations",
    "load_prompts",
    "load_tokenizer",
    "register_reward",
    "reward_for",
    "write_task",
]

_MODULES = {
    ".arithmetic": ("ArithmeticTask", "write_task"),
    ".config": ("DataConfig", "RewardConfig"),
    ".demonstrations": ("Demonstration", "check_demonstrations", "load_demonstrations"),
    ".errors": ("DataError", "ModelFolderError", "RlDataError", "SamplerStateError", "UnknownDataSourceError"),
    ".parquet": ("check_files",),
    ".prompts": ("Prompt", "load_prompts"),
    ".sampler": ("PromptSampler",),
    ".scoring": ("RewardFn", "gsm8k_score", "register_reward", "reward_for"),
    ".tiny_model": ("build_tiny_model",),
    ".tokenizer": ("check_model_folder", "find_model_folder", "load_tokenizer"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
