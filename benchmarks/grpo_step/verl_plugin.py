"""First module of each of verl's processes (`VERL_USE_EXTERNAL_MODULES`): packed attention by torch alone, and no TRL.

verl packs sequences into one row and attends with flash-attn 2. `ATTENTION` is the same kernel as torch ships it
(`torch.nn.attention.varlen`), for hosts without flash-attn 2. TRL is hidden because its releases of 2026 lack a class
that verl 0.9.1 imports where TRL is installed.
"""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

ATTENTION = "torch_varlen"
"""The value of transformers' `attn_implementation`."""
_borders: tuple[Tensor, Tensor, int] | None = None


def borders(position_ids_1T: Tensor) -> tuple[Tensor, int]:
    """Starts of the sequences of a packed row; the layers of a forward pass, which share a tensor, compute it once.

    Args:
        position_ids_1T: positions that begin at 0 in each sequence.

    Returns:
        Cumulative lengths, int32 [sequences + 1], and the length of the longest sequence.
    """
    global _borders  # transformers passes no state from layer to layer
    if _borders is None or _borders[0] is not position_ids_1T:
        starts = (position_ids_1T[0] == 0).nonzero().flatten()
        ends = torch.nn.functional.pad(starts, (0, 1), value=position_ids_1T.shape[1]).int()
        _borders = position_ids_1T, ends, int(ends.diff().max())
    return _borders[1], _borders[2]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row, as transformers calls it.

    Args:
        query: [1, heads, tokens, head dim], bfloat16 or float16.
        key: [1, key heads, tokens, head dim], like `value`.
        position_ids: [1, tokens].

    Returns:
        [1, tokens, heads, head dim], and no weights.

    Raises:
        ValueError: the rows are padded.
    """
    from torch.nn.attention.varlen import varlen_attn

    if attention_mask is not None or len(query) != 1:
        raise ValueError(f"{ATTENTION} needs packed rows: actor_rollout_ref.model.use_remove_padding=true")
    ends, longest = borders(position_ids)
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 does it without being asked
        options["enable_gqa"] = True
    out = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    assert isinstance(out, Tensor), "no auxiliary output was requested"
    return out[None], None


def install() -> None:
    """Hides TRL and registers the attention, in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    sys.modules["trl"] = None  # type: ignore[assignment]  # how Python marks a module that cannot be imported
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)


if "verl" in sys.modules:
    install()
