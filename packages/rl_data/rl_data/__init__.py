"""Prompts, tokenisation, rewards, and a built-in arithmetic task with a tiny model, for RL of language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arithmetic import ArithmeticTask, write_task
    from .config import DataConfig, RewardConfig
    from .demonstrations import Demonstration, check_demonstrations, load_demonstrations
    from .errors import DataError, ModelFolderError, RlDataError, SamplerStateError, UnknownDataSourceError
    from .parquet import check_files
    from .prompts import Prompt, load_prompts
    from .scoring import RewardFn, gsm8k_score, register_reward, reward_for
    from .sampler import PromptSampler
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

_EXPORTS = {
    "ArithmeticTask": ".arithmetic",
    "DataConfig": ".config",
    "DataError": ".errors",
    "Demonstration": ".demonstrations",
    "ModelFolderError": ".errors",
    "Prompt": ".prompts",
    "PromptSampler": ".sampler",
    "RewardConfig": ".config",
    "RewardFn": ".scoring",
    "RlDataError": ".errors",
    "SamplerStateError": ".errors",
    "UnknownDataSourceError": ".errors",
    "build_tiny_model": ".tiny_model",
    "check_demonstrations": ".demonstrations",
    "check_files": ".parquet",
    "check_model_folder": ".tokenizer",
    "find_model_folder": ".tokenizer",
    "gsm8k_score": ".scoring",
    "load_demonstrations": ".demonstrations",
    "load_prompts": ".prompts",
    "load_tokenizer": ".tokenizer",
    "register_reward": ".scoring",
    "reward_for": ".scoring",
    "write_task": ".arithmetic",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
