"""Fence around private parts of DeepSpeed, torch, transformers and PEFT. `plinth doctor` lists them."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from plinth_base.fence import Fence

from .errors import EngineConfigError

if TYPE_CHECKING:
    from .batch import Head

_MODULES = (
    *("distributed", "guard.collective_guard", "model.compilation", "model.experts", "model.flash4", "model.loading"),
    *(
        "model.lora",
        "model.nf4",
        "model.recomputation",
        "model.recurrence",
        "model.router_replay",
        "model.sequence_parallel",
        "state.checkpoint",
        "state.reshape",
        "zero.adamw",
    ),
    *("zero.grad_accumulation", "zero.hpz", "zero.optimizer", "zero.optimizer_step", "zero.zero3_gather"),
    *("zero.zero3_gradients", "zero.zero3_hooks"),
)


def warn_on_first_rank(line: str) -> None:
    """Log one line on rank 0."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        logging.getLogger("ds_engine").warning("%s", line)


FENCE = Fence(
    {
        "deepspeed": ">=0.19.8,<0.20",
        "fla-core": ">=0.6,<0.7",
        "flash-attn-4": ">=4.0.0b36,<4.1",
        "peft": ">=0.21.2,<0.22",
        "torch": ">=2.11,<2.14",
        "transformers": ">=5.17,<5.20",
    },
    refusal=EngineConfigError,
    warn=warn_on_first_rank,
)
"""pyproject.toml states the same versions."""


def records() -> list[dict[str, str]]:
    """One row for each patch of the package, with its state here: active, stock path, refused or not installed."""
    return FENCE.records(f"{__package__}.{module}" for module in _MODULES)


def auto_class(config: Any, head: Head) -> Any:
    """transformers' class that builds and loads the model of a configuration with this head."""
    import transformers

    if head == "value":
        if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            _register_value_model(config)
        return transformers.AutoModelForSequenceClassification
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def _register_value_model(config: Any) -> None:
    """Give a vision-language model that has none a class with a value head, made of transformers' own parts."""
    import transformers
    from transformers import conversion_mapping
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return
    lm: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    parent = next(one for one in lm.__mro__[1:] if issubclass(one, transformers.PreTrainedModel))
    name = lm.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    own = {"config_class": type(config), "__module__": lm.__module__}  # otherwise no tensor of a folder is renamed
    kind = type(name, (GenericForSequenceClassification, parent), own)
    if (names := conversion_mapping.get_checkpoint_conversion_mapping(lm.__name__)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(name, names, overwrite=True)
    transformers.AutoModelForSequenceClassification.register(type(config), kind, exist_ok=True)


def text_part(backbone: Any) -> Any:
    """The text model inside the backbone of a vision-language model; of other models the backbone itself."""
    names = ("language_model", "text_model") if hasattr(backbone, "get_image_features") else ()
    return next((getattr(backbone, name) for name in names if hasattr(backbone, name)), backbone)


def transformers_message(error: Exception) -> str:
    """The first line of transformers' error: the next ones list all classes, or advise an upgrade of a pinned stack."""
    line = str(error).partition("\n")[0]
    if match := re.match(r"Unrecognized configuration class <class '[\w.]*?(\w+)'> for .*: (\w+)", line):
        return f"transformers has no {match[2]} of {match[1]}"
    if "does not recognize this architecture" not in line:
        return line
    problem, tested = line.partition(". ")[0], FENCE.tested["transformers"]
    return f"{problem}; installed is transformers {version('transformers')}, tested is {tested}"
