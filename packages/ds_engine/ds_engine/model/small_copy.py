"""A small random copy of an architecture: the same configuration with few layers, small widths and short windows."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any, Literal

import torch
from torch import nn

WINDOW = 5
"""Tokens of sliding windows and attention chunks in the copy."""
ORIGINAL_LENGTH = 10
"""Length from which rotary frequencies that depend on the length change in the copy."""
_NUM_LAYERS = 8
"""More only if the configuration lists a kind of layer that occurs later."""

_COUNTS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_kv_shared_layers"), 2),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
}
_WIDTHS = {
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "embedding_size", "lru_width"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "intermediate_size_mlp"), 96
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("head_dim", "global_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_headdim", "kv_channels", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads",), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("v_head_dim",), 12),
}
"""Largest values in the copy, by transformers' names."""
_WINDOWS = ("sliding_window", "attention_window_size", "window_size", "local_attention", "attention_chunk_size")


def small_config(config: Any, *, widths: Literal["fixed", "scaled", "kept"] = "fixed") -> Any:
    """The configuration of the copy, without dropout.

    Args:
        widths: fixed: those of `_WIDTHS`. scaled: sizes and numbers of heads divided by the largest common power of
            two, for a model whose widths depend on each other. kept: the model's own.
    """
    small = copy.deepcopy(config)
    vision: Any = getattr(small, "vision_config", None)
    for part in _parts(small):
        window = getattr(part, "window_size", None)
        _shrink(part, {**_COUNTS, **_WIDTHS} if widths == "fixed" else _COUNTS)
        if widths == "scaled":
            _scale(part)
        if window is not None and part is vision:
            part.window_size = window  # in pixels
    if vision is not None and hasattr(small, "image_token_id"):
        _shrink_images(small)
    turn_off_dropout(small)
    return small


def _shrink_images(config: Any) -> None:
    """Few layers and small images of the vision tower; special tokens that are in the vocabulary of the copy."""
    vision = config.vision_config
    values = vision.to_dict()
    patches = 2 * int(getattr(config, "scale_factor", None) or 4)
    changes: dict[str, Any] = {**dict.fromkeys(("num_hidden_layers", "depth"), 2), "hidden_size": 64, "embed_dim": 64}
    changes |= {**dict.fromkeys(("num_attention_heads", "num_heads"), 4), "intermediate_size": 96}
    changes |= {"out_hidden_size": config.get_text_config().hidden_size, "fullatt_block_indexes": [1]}
    size = values.get("patch_size") or 0
    new = patches * int(size[0] if isinstance(size, list | tuple) else size)
    old = values.get("image_size")
    changes |= {"deepstack_visual_indexes": [0, 1], "image_size": [new, new] if isinstance(old, list | tuple) else new}
    for name, value in changes.items():
        if name in values:
            setattr(vision, name, value)
    if getattr(config, "image_grid_pinpoints", None) and isinstance(old, int):
        config.image_grid_pinpoints = [[new * (side // old) for side in sides] for sides in config.image_grid_pinpoints]
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if hasattr(vision, "spatial_merge_size") and rope and "mrope_section" not in rope:  # the model's code has it
        half = _rotary_dim(text, rope) // 2
        rope["mrope_section"] = [half - 3 * half // 8 * 2, 3 * half // 8, 3 * half // 8]
    if hasattr(config, "mm_tokens_per_image"):
        config.mm_tokens_per_image = 16
    for token, name in enumerate(("image_token_id", "video_token_id"), start=1):
        if hasattr(config, name):
            setattr(config, name, token)


def turn_off_dropout(config: Any) -> dict[str, float]:
    """Set every dropout of a configuration to 0, in place; returns the rates that were not 0.

    Other noise stays, such as router jitter, which PhiMoE also uses to choose experts without noise.
    """
    rates = {}
    for part in _parts(config):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and value > 0 and "drop" in name:
                setattr(part, name, 0.0)
                rates[name] = value
    return rates


def _parts(config: Any) -> list[Any]:
    """The configuration and its sub-configurations, such as `text_config`."""
    subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for sub in subs if hasattr(sub, "to_dict") for part in _parts(sub))]


def _shrink(config: Any, caps: dict[str, int]) -> None:
    values = config.to_dict()
    values |= {alias: values.get(name) for alias, name in getattr(config, "attribute_map", {}).items()}
    changes = _fewer_layers(values)
    longest = values.get("max_position_embeddings") or math.inf
    for name, value in values.items():
        if name in changes or isinstance(value, bool):
            continue
        if name.endswith("token_id"):
            too_large = isinstance(value, list) or (isinstance(value, int) and value >= caps["vocab_size"])
            changes |= {name: 0} if too_large else {}
        elif isinstance(value, int) and name in caps:
            changes[name] = min(value, caps[name])
        elif isinstance(value, int) and name in _WINDOWS and value < longest:
            changes[name] = min(value, WINDOW)
    if caps.keys() >= _WIDTHS.keys():
        changes |= _dependent_widths(values, changes)
    for name, value in changes.items():
        with contextlib.suppress(AttributeError):  # a property that follows from other values
            setattr(config, name, value)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        _shrink_rotary(config, parameters)


def _fewer_layers(values: dict[str, Any]) -> dict[str, Any]:
    """The first layers: at least one of each kind that the configuration lists by layer or by layer number."""
    total = values.get("num_hidden_layers") or 0
    kinds = {name: list(v) for name, v in values.items() if isinstance(v, list | tuple) and v and len(v) == total}
    values = {name: v for name, v in values.items() if "layer" in name and name not in kinds}
    numbers = {name: v for name, v in values.items() if _are_numbers(v, total)}
    needed = [max(map(v.index, v)) + 1 for v in kinds.values()] + [min(v) + 1 for v in numbers.values()]
    num_layers = min(total, max([_NUM_LAYERS, *needed]))
    changes: dict[str, Any] = {name: v[:num_layers] for name, v in kinds.items()}
    changes |= {name: [x for x in v if x < num_layers] for name, v in numbers.items()}
    return changes | {name: num_layers for name, v in values.items() if type(v) is int and v == total}


def _dependent_widths(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Widths that follow from others, `changes`, which are those of the copy."""
    widths: dict[str, Any] = {}
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int):
        widths["num_key_value_heads"] = min(kv_heads, 2 if kv_heads < heads else 4)
    if "qk_rope_head_dim" in changes:
        rope, nope = changes["qk_rope_head_dim"], changes.get("qk_nope_head_dim", 0)
        widths |= {k: v for k, v in {"qk_head_dim": rope + nope, "head_dim": rope}.items() if k in values}
    if "attention_hidden_size" in values and "hidden_size" in changes:  # Zamba: twice the hidden size
        widths |= {"attention_hidden_size": 2 * changes["hidden_size"]}
        widths |= {"attention_head_dim": 2 * changes["hidden_size"] // changes.get("num_attention_heads", 1)}
    # Mamba-2: heads * head size = expansion * hidden size.
    for num, size, expand in (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand")):
        if values.get(num) and values.get(expand) and size in changes:
            widths[num] = int(values[expand] * changes["hidden_size"]) // changes[size]
            widths |= {"mamba_d_ssm": widths[num] * changes[size]} if "mamba_d_ssm" in values else {}
    return widths


def _scale(config: Any) -> None:
    """Divide sizes and numbers of heads by their largest common power of two."""
    sizes = {
        name: value
        for name, value in config.to_dict().items()
        if type(value) is int and value > 1 and any(word in name for word in ("hidden_size", "heads", "intermediate"))
    }
    factor = min((value & -value for value in sizes.values()), default=1)
    for name, value in sizes.items():
        with contextlib.suppress(AttributeError):
            setattr(config, name, value // factor)


def _are_numbers(value: Any, total: int) -> bool:
    """True if `value` is a list of layer numbers."""
    return isinstance(value, list) and bool(value) and all(type(x) is int and 0 <= x < total for x in value)


def _shrink_rotary(config: Any, parameters: dict[str, Any]) -> None:
    if sections := parameters.get("mrope_section"):
        half = _rotary_dim(config, parameters) // 2
        fewer = [half * section // sum(sections) for section in sections]
        parameters["mrope_section"] = [half - sum(fewer[1:]), *fewer[1:]]
    kind = str(parameters.get("rope_type"))
    if "dynamic" not in kind and kind != "longrope":
        return
    if "dynamic" in kind:
        config.max_position_embeddings = ORIGINAL_LENGTH
    parameters["original_max_position_embeddings"] = ORIGINAL_LENGTH
    if hasattr(config, "original_max_position_embeddings"):  # Phi-3, whose configuration prefers this one
        config.original_max_position_embeddings = ORIGINAL_LENGTH
    num = _rotary_dim(config, parameters) // 2
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = parameters[name][:num]


def _rotary_dim(config: Any, parameters: dict[str, Any]) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def randomize(model: nn.Module) -> None:
    """Draw weights with outputs of the size of their inputs, and biases and scales around their initial values.

    Upstream's initialization is so small that attention, biases and recurrent states hardly change the outputs.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
