"""Log-probability of chosen tokens and the entropy, straight from hidden states and the output weight.

Start at :func:`rl_core.linear_log_prob.api.linear_log_prob`. Map: ``types`` the equations and what every backend takes
and gives back, ``reference`` the oracle, ``chunked`` plain torch, ``triton_backend`` with ``triton_forward``,
``triton_backward`` and the portable ``triton_kernels``, ``hopper`` with the warp-specialised ``hopper_kernels``,
``tiles`` block sizes and the tuner, ``parallel`` the vocabulary-parallel reduction.
"""

import sys
from types import ModuleType
from typing import Any

from .api import linear_log_prob

__all__ = ["linear_log_prob"]


class _CallableModule(ModuleType):
    """The package exports a function of this folder's name, and importing a submodule binds that name to the folder.

    Whichever of the two ``rl_core.linear_log_prob`` is at the moment, calling it computes log-probs.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return linear_log_prob(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
