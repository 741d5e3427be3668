"""Losses on preferences: Bradley-Terry for reward models; DPO, IPO and KTO for policies.

Shapes: P pairs of a chosen and a rejected response; N responses that are labeled one by one. A log-ratio is
log p(y | x) - log p_ref(y | x) of a whole response: `segment_sum(log_probs_K - ref_log_probs_K, response_lens_S)`.
All losses are at least float32, differentiable, one value per pair or response; the caller takes the mean.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .._tensors import require_1d, require_same_shape, upcast
from ..errors import ShapeError, require
from ..options import PairLoss, require_option


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor | None = None, *, center_coef: float = 0.0
) -> Tensor:
    """Negative log-likelihood of preferences under the Bradley-Terry model, [P], from the rewards of both responses.

        loss = -log sigmoid(r_chosen - r_rejected - m) + center_coef * (r_chosen + r_rejected)^2

    Args:
        margins_P: m, how much better the chosen response is; None: 0. It gets no gradient.
        center_coef: keeps the rewards of a pair around 0, which the first term leaves open.

    Sources: Bradley and Terry 1952; InstructGPT, arXiv:2203.02155, equation 1; the margin: Llama 2, arXiv:2307.09288,
    equation 2; the centering: Eisenstein et al. 2023, arXiv:2312.09244.
    Raises `ValueError` for a negative `center_coef`, `ShapeError` for shapes.
    """
    require(center_coef >= 0.0, "center_coef", center_coef, "0 or more")
    margins = torch.zeros_like(chosen_P) if margins_P is None else margins_P.detach()
    chosen, rejected, margins = _pairs(chosen_P=chosen_P, rejected_P=rejected_P, margins_P=margins)
    loss = -logsigmoid(chosen - rejected - margins)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss


def dpo_loss(
    chosen_log_ratios_P: Tensor,
    rejected_log_ratios_P: Tensor,
    *,
    kind: PairLoss = "dpo",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of direct preference optimization, [P], with h = chosen log-ratio - rejected log-ratio.

        dpo:   loss = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h),   e = label_smoothing
        ipo:   loss = (h - 1 / (2 beta))^2

    `beta` weighs the KL term to the reference: a large one keeps the policy close. DPO's gradient vanishes only as h
    grows without bound; IPO's vanishes at h = 1 / (2 beta), so that it does not overfit preferences without noise.

    Args:
        label_smoothing: share of pairs whose labels are taken to be the wrong way round; 0 to below 0.5, dpo only.

    Sources: DPO: Rafailov et al. 2023, arXiv:2305.18290, equation 7; its smoothing (conservative DPO): Mitchell 2023,
    "A note on DPO with noisy preferences"; IPO: Azar et al. 2023, arXiv:2310.12036, equation 17, with tau = beta and
    sums over tokens as in the paper.
    Raises `ValueError` for an option out of range, `ShapeError` for shapes.
    """
    require_option("kind", kind, PairLoss)
    require(beta > 0.0, "beta", beta, "above 0")
    fits = 0.0 <= label_smoothing < 0.5 and (not label_smoothing or kind == "dpo")
    require(fits, "label_smoothing", label_smoothing, "0 to below 0.5, and 0 with kind ipo")
    chosen, rejected = _pairs(chosen_log_ratios_P=chosen_log_ratios_P, rejected_log_ratios_P=rejected_log_ratios_P)
    h = chosen - rejected
    if kind == "ipo":
        return (h - 1.0 / (2.0 * beta)).square()
    loss = -(1.0 - label_smoothing) * logsigmoid(beta * h)
    return loss - label_smoothing * logsigmoid(-beta * h) if label_smoothing else loss


def kto_loss(
    log_ratios_N: Tensor,
    is_desirable_N: Tensor,
    kl: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Loss of Kahneman-Tversky optimization, [N], for responses that are labeled one by one.

        desirable:     loss = desirable_weight   * (1 - sigmoid(beta (log-ratio - kl)))
        undesirable:   loss = undesirable_weight * (1 - sigmoid(beta (kl - log-ratio)))

    Args:
        is_desirable_N: bool.
        kl: the reference point, `kto_kl`; it gets no gradient.
        desirable_weight: lambda_D. With n+ desirable and n- undesirable examples, the paper advises
            desirable_weight * n+ / (undesirable_weight * n-) between 1 and 3/2.
        undesirable_weight: lambda_U.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, section 4; the loss is lambda_y - v.
    Raises `ValueError` for an option out of range, `ShapeError` for shapes.
    """
    require(beta > 0.0, "beta", beta, "above 0")
    require(desirable_weight >= 0.0, "desirable_weight", desirable_weight, "0 or more")
    require(undesirable_weight >= 0.0, "undesirable_weight", undesirable_weight, "0 or more")
    require_1d(log_ratios_N=log_ratios_N)
    require_same_shape(log_ratios_N=log_ratios_N, is_desirable_N=is_desirable_N)
    (log_ratios,) = upcast(log_ratios_N)
    reference = torch.as_tensor(kl).detach().to(log_ratios)
    if reference.numel() != 1:
        raise ShapeError(field="kl", value=tuple(reference.shape), allowed="one number")
    desirable = is_desirable_N.to(log_ratios)
    sign = 2.0 * desirable - 1.0
    weight = desirable_weight * desirable + undesirable_weight * (1.0 - desirable)
    return weight * torch.sigmoid(-beta * sign * (log_ratios - reference))


def kto_kl(mismatched_log_ratios_N: Tensor) -> Tensor:
    """The reference point of `kto_loss`: max(0, mean log-ratio of responses that belong to other prompts), 0-d.

    The log-ratio of an unrelated response y' to the prompt x estimates KL(policy || reference) without samples of the
    policy. The estimate is biased and cheap; it is clamped because a KL divergence is not negative. Take it over the
    whole batch and not over a micro batch, so that it does not depend on their sizes. Detached.
    Source: arXiv:2402.01306, section 4. Raises `ShapeError` unless there is at least one value.
    """
    require_1d(mismatched_log_ratios_N=mismatched_log_ratios_N)
    if not mismatched_log_ratios_N.numel():
        raise ShapeError(field="mismatched_log_ratios_N", value=0, allowed="at least one response")
    (log_ratios,) = upcast(mismatched_log_ratios_N.detach())
    return log_ratios.mean().clamp(min=0.0)


def _pairs(**rows: Tensor) -> tuple[Tensor, ...]:
    """The rows of P values in one dtype of at least float32."""
    require_1d(**rows)
    require_same_shape(**rows)
    return upcast(*rows.values())
