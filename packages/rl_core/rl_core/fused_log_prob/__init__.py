"""Fused log-prob op: log-probs of target tokens and entropy from hidden states and the output weight, without logits.

Modules: ``api`` the public function; ``types`` the equations and the backend interface; ``reference`` the oracle of the
tests; ``chunked`` plain torch; ``triton_backend`` with ``triton_forward``, ``triton_backward`` and the portable
``triton_kernels``; ``hopper`` with the warp-specialized ``hopper_kernels``; ``tiles`` block sizes and the tuner.
"""

from .api import linear_log_prob

__all__ = ["linear_log_prob"]
