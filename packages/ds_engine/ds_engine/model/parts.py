"""Finds the parts of a transformers model: backbone, transformer layers, heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..upstream import text_part

VALUE_HEAD = "score"
"""Attribute that holds the value head, as transformers names it in every family."""
_VECTORS = ("A_log", "D")
"""Mamba's and Kimi's names of a decay and a factor of each channel."""


def find_backbone(model: Any) -> tuple[str, nn.Module | None]:
    """(attribute name, module) of the model without its head; the module is None if the model has no such attribute."""
    name = getattr(model, "base_model_prefix", "")
    if not hasattr(model, name or " "):  # Llama 4 names another attribute than it has
        name = "model"
    backbone = getattr(model, name, None)
    return name, backbone if isinstance(backbone, nn.Module) and backbone is not model else None


def linear_layers(model: Any, *types: type[nn.Linear], vision: bool = False) -> dict[str, Any]:
    """Layers of exactly one of `types` inside the backbone, keyed by name in `model`, in the model's order; with
    `vision` also those of a vision tower."""
    prefix, backbone = find_backbone(model)
    if backbone is None:
        return {}
    inside = {id(layer) for layer in (backbone if vision else text_part(backbone)).modules()}
    layers = backbone.named_modules()
    return {f"{prefix}.{name}": layer for name, layer in layers if type(layer) in types and id(layer) in inside}


def vision_names(model: Any) -> list[str]:
    """Names in `model` of the modules beside the text model: vision tower and projector."""
    prefix, backbone = find_backbone(model)
    text = None if backbone is None else text_part(backbone)
    if backbone is None or text is backbone:
        return []
    return [f"{prefix}.{name}" for name, part in backbone.named_children() if part is not text]


def transformer_layers(model: Any) -> list[Any]:
    """The transformer layers of `model` (transformers' GradientCheckpointingLayer), in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def decoder_layers(model: Any) -> list[Any]:
    """The transformer layers without those of a vision tower."""
    _, backbone = find_backbone(model)
    return transformer_layers(model if backbone is None else text_part(backbone))


def table_parameters(model: Any) -> set[int]:
    """Ids of the parameters of embeddings and heads, and of convolutions: their rows or filters are no matrix."""
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    return {
        id(parameter)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | _ConvNd) or module is head or name.rpartition(".")[2] == VALUE_HEAD
        for parameter in module.parameters(recurse=False)
    }


def is_vector(name: str) -> bool:
    """True for a parameter that is a vector whatever its dimensions: biases of all experts, decays of all channels."""
    return name.endswith("bias") or name.rpartition(".")[2] in _VECTORS


def with_globals(module: nn.Module, **names: Any) -> Callable[..., Any]:
    """The forward of the module's class, bound to `module`, in which `names` replace functions of its file."""
    original = inspect.unwrap(type(module).forward)
    assert isinstance(original, FunctionType)
    forward = FunctionType(
        original.__code__,
        original.__globals__ | names,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    bound: Callable[..., Any] = forward.__get__(module)
    return bound
