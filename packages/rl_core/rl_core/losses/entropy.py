"""Entropy of the policy's next-token distribution, and its bonus.

Shapes: K response tokens, V vocabulary.
"""

from torch import Tensor

from .._tensors import upcast

__all__ = ["entropy_bonus", "entropy_from_logits"]


def entropy_bonus(entropy_K: Tensor, coefficient: float) -> Tensor:
    """-coefficient * entropy, the term to add to a per-token loss, [K]; minimising it raises the entropy.

    Source: Williams and Peng 1991; Mnih et al. 2016, arXiv:1602.01783. A negative coefficient lowers the entropy.
    `rl_core.linear_log_prob` gives the entropy with its gradient without holding the logits.
    """
    (entropy,) = upcast(entropy_K)
    return -coefficient * entropy


def entropy_from_logits(logits_KV: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v in nats, [K], from logits that are held anyway; in at least float32, differentiable.

    Logits of -inf (banned tokens) count as probability 0.
    """
    (logits,) = upcast(logits_KV)
    log_probs = logits.log_softmax(dim=-1)
    # 0 * -inf is NaN, and so is its gradient: take the banned tokens out before the product
    return -(log_probs.exp() * log_probs.masked_fill(log_probs.isinf(), 0.0)).sum(dim=-1)
