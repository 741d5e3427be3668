"""Defaults for the model of a run, from its size, its context and its chat template.

`choose_defaults` is the pure rule: dotted key -> value and reason. A setting that is given is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plinth_base.model_folder import ModelFolderError, find_model_folder, read_model_config, stored_tensors

from ..config import BUILTIN_MODEL

_REFERENCE = (7e9, 1e-6)
"""Parameters and learning rate of a model whose policy-gradient recipes agree (verl, DAPO: arXiv:2503.14476)."""
_EXPONENT = 0.6
"""Smaller models take larger rates: 135M parameters learn at 1e-5 (docs/first_model.md), ten times the rate of 7B."""
_RATES = (3e-7, 1e-5)
"""Smallest and largest rate for all weights."""
_LORA_FACTOR = 10.0
"""Adapters want about ten times the rate ('LoRA Without Regret', Schulman 2025)."""
_CRITIC_FACTOR = 10.0
"""A critic starts with a random head: 1e-5 beside an actor's 1e-6 is common (verl, OpenRLHF 9e-6 beside 5e-7)."""
_MOST_RATE = 2e-4
_BUILTIN_RATES = {"actor": 1e-4, "critic": 5e-4}
_LEARNED_REWARD_KL = 0.01
"""OpenRLHF's default; TRL's PPO has 0.05."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a model folder from which defaults follow."""

    num_parameters: int | None = None
    """None: the folder has no safetensors files."""
    context: int | None = None
    """`max_position_embeddings`; None: unknown."""
    thinks: bool = False
    """The chat template knows `<think>`: responses begin with long reasoning."""


Defaults = Mapping[str, tuple[Any, str]]


def choose_defaults(
    facts: ModelFacts | None, *, lora: Mapping[str, bool], prompt_tokens: int, learned_reward: bool, on_gpu: bool
) -> Defaults:
    """Dotted key -> (value, reason) of learning rates, samples, response length and KL.

    Args:
        facts: None for the built-in model.
        lora: configuration section of each trained model -> it has adapters.
        prompt_tokens: tokens of the longest prompt.
        learned_reward: scores come from a reward model.
    """
    chosen: dict[str, tuple[Any, str]] = {
        f"{section}.optim.lr": learning_rate(facts, section, has_adapters) for section, has_adapters in lora.items()
    }
    if facts is None:
        samples, tokens = (8, "the default"), (256, "the default")
    else:
        samples = (8, "a group to compare") if on_gpu else (4, "half a group on the CPU")
        tokens = response_length(facts, prompt_tokens, on_gpu=on_gpu)
    chosen |= {"sampling.n": samples, "sampling.max_tokens": tokens}
    chosen["algorithm.kl_coef"] = (
        (_LEARNED_REWARD_KL, "a reward model can be exploited far from the first policy")
        if learned_reward and facts is not None
        else (0.0, "rewards of a rule" if facts is not None else "the built-in model")
    )
    return chosen


def learning_rate(facts: ModelFacts | None, section: str, has_adapters: bool) -> tuple[float, str]:
    """Rate for policy gradients, one significant digit: 1e-6 at 7B, larger for smaller models, adapters, critics."""
    if facts is None:
        return _BUILTIN_RATES.get(section, _BUILTIN_RATES["actor"]), "the built-in model is small"
    size, (reference, rate) = facts.num_parameters, _REFERENCE
    why = "the size of the model is unknown"
    if size is not None:
        rate = min(max(rate * (reference / max(size, 1)) ** _EXPONENT, _RATES[0]), _RATES[1])
        why = f"{size / 1e9:.2g}B parameters" if size >= 1e9 else f"{size / 1e6:.3g}M parameters"
    if has_adapters:
        rate, why = rate * _LORA_FACTOR, f"{why}, LoRA"
    if section == "critic":
        rate, why = rate * _CRITIC_FACTOR, f"{why}, a new value head"
    return float(f"{min(rate, _MOST_RATE):.0e}"), why  # one significant digit


def response_length(facts: ModelFacts, prompt_tokens: int, *, on_gpu: bool) -> tuple[int, str]:
    """Tokens of a response that fit into the context beside the longest prompt; a power of two if it is cut."""
    wanted, why = (4096, "its template lets it think") if facts.thinks else (1024, "a worked solution")
    if not on_gpu:
        wanted, why = 128, "responses on the CPU are slow"
    if facts.context is None or facts.context - prompt_tokens >= wanted:
        return wanted, why
    left = max(1, facts.context - prompt_tokens)
    return 2 ** int(math.log2(left)), f"{facts.context} positions for prompt and response"


def read_facts(path: str) -> ModelFacts | None:
    """The facts about a model folder, from its configuration, template and headers; None for the built-in model.

    What cannot be read is unknown; the checks of the folder say why.
    """
    if path == BUILTIN_MODEL:
        return None
    folder = find_model_folder(path)
    try:
        config = read_model_config(folder)
    except ModelFolderError:
        config = {}
    config = config.get("text_config") or config
    context = config.get("max_position_embeddings")
    template = _read_text(folder / "chat_template.jinja") + _read_text(folder / "tokenizer_config.json")
    try:
        size = sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values()) or None
    except ModelFolderError:
        size = None
    return ModelFacts(
        num_parameters=size, context=context if isinstance(context, int) else None, thinks="<think>" in template
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
