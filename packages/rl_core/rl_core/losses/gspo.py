"""Group sequence policy optimisation: the clipped loss with one importance ratio for a whole sequence.

Shapes: K response tokens of all sequences one after another, S sequences.
"""

from torch import Tensor

from .._tensors import require_same_shape, safe_exp, upcast
from ..batching.segments import broadcast_to_tokens, segment_mean
from .policy import PolicyLossStats, clipped_surrogate, require_bounds

__all__ = ["gspo_loss"]


def gspo_loss(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    response_lens_S: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, PolicyLossStats]:
    """Per-token sequence-ratio loss, [K], in at least float32.

        s_i = exp(1/|y_i| sum_t (log_probs - old_log_probs)_it)              the sequence's geometric mean ratio
        loss_it = -min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)
        s_it = sg(s_i) * exp(log_probs_it - sg(log_probs_it))                value s_i, gradient through token t

    With one advantage a sequence this is GSPO's objective and gradient under the "seq_mean_token_mean" aggregation the
    paper uses; advantages that differ by token are GSPO-token. Every sequence must be whole in one micro batch.
    Source: Zheng et al. 2025, arXiv:2507.18071, equations 5, 7 and 13; the default bounds are theirs.
    """
    require_bounds(clip_low, clip_high)
    require_same_shape(log_probs_K=log_probs_K, old_log_probs_K=old_log_probs_K, advantages_K=advantages_K)
    log_probs, old_log_probs, advantages = upcast(log_probs_K, old_log_probs_K.detach(), advantages_K.detach())
    log_ratio = log_probs - old_log_probs
    sequence_ratio = safe_exp(segment_mean(log_ratio.detach(), response_lens_S))
    through_token = 1.0 + (log_probs - log_probs.detach())  # value 1, and the gradient of exp at 0
    ratio = broadcast_to_tokens(sequence_ratio, response_lens_S) * through_token
    return clipped_surrogate(ratio, log_ratio, advantages, clip_low, clip_high, None)
