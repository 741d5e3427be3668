"""Rotary frequencies that depend on the longest sequence of a call (longrope, dynamic NTK), computed per sequence.

Upstream selects the frequencies of a whole call by its largest position, so that a sequence's log-probs would depend on
its neighbors in the micro batch. Dynamic frequencies also depend on earlier calls: they shrink again only after a call
below the original length (transformers/modeling_rope_utils.py, `dynamic_rope_update`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .attention import PackedLayout


def rotary_per_sequence(backbone: nn.Module) -> Callable[[PackedLayout], None]:
    """Make the rotary modules of `backbone` compute each sequence by itself; does nothing for static frequencies.

    Returns:
        A function that takes the layout of the next call.
    """
    modules = [module for module in backbone.modules() if _varies(getattr(module, "rope_type", None))]
    layout: PackedLayout | None = None

    def set_layout(packing: PackedLayout) -> None:
        nonlocal layout
        if modules and packing.sp_group is not None:
            raise ModelError(
                "rotary positions that depend on the sequence's length (longrope, dynamic) cannot be distributed",
                field="sequence_parallel",
                value=packing.sp_group.size,
                allowed="1",
            )
        if modules and packing.tree is not None:
            raise ModelError("rotary positions that depend on the sequence's length cannot share prefixes")
        layout = packing

    def install(module: Any) -> None:
        original: Callable[..., tuple[Tensor, Tensor]] = module.forward

        def alone(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            original(x, position_ids[:, :1] * 0, *args, **kwargs)  # forget a longer sequence
            return original(x, position_ids, *args, **kwargs)

        def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if layout is None:
                return original(x, position_ids, *args, **kwargs)
            if position_ids.shape[1] == sum(layout.borders.lengths) and len(position_ids) == 1:
                parts = [
                    alone(x, part, *args, **kwargs) for part in position_ids.split(list(layout.borders.lengths), dim=1)
                ]
                return torch.cat([cos for cos, _ in parts], dim=1), torch.cat([sin for _, sin in parts], dim=1)
            # Padded rows: row s has lengths[s] tokens.
            rows = position_ids.expand(len(layout.borders.lengths), -1)
            parts = [alone(x, rows[s : s + 1, :n], *args, **kwargs) for s, n in enumerate(layout.borders.lengths)]
            pad = nn.utils.rnn.pad_sequence
            return pad([cos[0] for cos, _ in parts], True), pad([sin[0] for _, sin in parts], True)

        module.forward = forward

    for module in modules:
        install(module)
    return set_layout


def _varies(rope_type: Any) -> bool:
    """True if a rotary module's `rope_type`, a name or a name for each kind of layer, depends on the length."""
    names = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any("dynamic" in str(name) or name == "longrope" for name in names)
