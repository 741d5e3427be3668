"""Log-probability of chosen tokens and the entropy, straight from hidden states and the output weight.

Start at :func:`rl_core.fused_log_prob.api.linear_log_prob`. Map: ``types`` the equations and what every backend takes
and gives back, ``reference`` the oracle, ``chunked`` plain torch, ``triton_backend`` with ``triton_forward``,
``triton_backward`` and the portable ``triton_kernels``, ``hopper`` with the warp-specialised ``hopper_kernels``,
``tiles`` block sizes and the tuner, ``parallel`` the vocabulary-parallel reduction.
"""

from .api import linear_log_prob

__all__ = ["linear_log_prob"]
