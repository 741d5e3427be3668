"""Advantages of on-policy distillation: how much more likely a teacher finds each token that the student sampled."""

from torch import Tensor

from ..batching.segments import returns_to_go
from ..errors import require
from ..kl.estimators import kl_estimate


def distillation_advantages(
    log_probs_K: Tensor, teacher_log_probs_K: Tensor, lens_S: Tensor, *, gamma: float = 0.0
) -> Tensor:
    """Advantages [K], in at least float32, whose policy gradient minimizes the reverse KL to a teacher.

        r_t = log p_teacher(y_t) - log p_student(y_t)         minus the k1 estimate of KL(student || teacher)
        A_t = r_t + gamma * A_{t+1}

    With gamma = 0 the expected gradient is that of the sum over t of KL(student || teacher) in the contexts that the
    student has sampled: Lu and Thinking Machines Lab 2025, "On-Policy Distillation". With gamma = 1 it is that of the
    KL between whole responses: Gu et al. 2023, "MiniLLM", arXiv:2306.08543, equation 2 (without its length
    normalization), with more variance.

    Args:
        log_probs_K: log-probs of the K sampled tokens under the policy that sampled them; no gradient flows.
        teacher_log_probs_K: those of the teacher.
        lens_S: number of tokens of each of the S sequences, which add up to K.
        gamma: discount, 0 to 1.

    Raises `ValueError` for a gamma out of range, `ShapeError` for shapes.
    """
    require(0.0 <= gamma <= 1.0, "gamma", gamma, "0 to 1")
    reward_K = -kl_estimate(log_probs_K.detach(), teacher_log_probs_K.detach(), kind="k1")
    return returns_to_go(reward_K, lens_S, gamma=gamma)
