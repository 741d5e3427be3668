"""The compared implementations: each computes log-probs, or their negative mean, from ``(hidden, weight, targets)``.

``build`` raises ImportError if the package or hardware is missing; the table then says so.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """``outputs`` are the results of the call, in order: "log_prob", "entropy" per token, or "loss" (negative mean)."""

    name: str
    build: Callable[[], Call]
    outputs: tuple[str, ...] = ("log_prob",)
    forward: bool = True  # whether the forward pass alone is timed
    largest_tokens: int | None = None  # skipped above this many tokens to save time


def _plinth(keep_bytes: int | None) -> Call:
    from rl_core import linear_log_prob

    return lambda h, w, y: (linear_log_prob(h, w, y, keep_bytes=keep_bytes)[0],)


def _plinth_entropy(keep_bytes: int | None) -> Call:
    from rl_core import linear_log_prob

    return lambda h, w, y: linear_log_prob(h, w, y, keep_bytes=keep_bytes)


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor]:
    log_probs = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    return (log_probs.gather(1, targets[:, None])[:, 0],)


def _compiled() -> Call:
    torch._dynamo.config.cache_size_limit = 256
    return torch.compile(_plain, dynamic=False)


def _liger(reduction: str) -> Call:
    """Triton fused linear cross-entropy. "mean" computes gradients in the forward pass and cannot weight tokens."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    sign = 1 if reduction == "mean" else -1
    return lambda h, w, y: (sign * Function.apply(h, w, y, None, None, -100, 0.0, 0.0, reduction)[0],)


def _liger_sm90() -> Call:
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # its check synchronizes
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function as Function,
    )

    return lambda h, w, y: (-Function.apply(h, w, y),)


def _cce() -> Call:
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, y: (-linear_cross_entropy(h, w, y, reduction="none", filter_eps=None),)


CONTESTANTS = (
    Contestant(name="plinth", build=lambda: _plinth(None), forward=False),
    Contestant(name="plinth, keeping none", build=lambda: _plinth(0)),
    Contestant(name="plinth, keeping all", build=lambda: _plinth(2**40), forward=False),
    Contestant(
        name="plinth, with entropy",
        build=lambda: _plinth_entropy(None),
        outputs=("log_prob", "entropy"),
        forward=False,
    ),
    Contestant(name="torch", build=lambda: _plain),
    Contestant(name="torch.compile", build=_compiled, forward=False),
    Contestant(name="Liger", build=lambda: _liger("none"), forward=False),
    Contestant(name="Liger, mean only", build=lambda: _liger("mean"), outputs=("loss",), forward=False),
    Contestant(name="Liger SM90", build=_liger_sm90),
    Contestant(name="Apple CCE, unfiltered", build=_cce, forward=False, largest_tokens=4096),
)
