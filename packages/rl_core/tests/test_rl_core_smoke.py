"""Imports, exports and pickling of the package."""

import os
import subprocess
import sys

import pytest


def test_import_is_light_and_only_the_triton_backend_imports_triton() -> None:
    code = (
        "import sys, rl_core\n"
        "from rl_core import BatchConfig, BatchError, KLKind, LossAggregation, check_clip\n"
        "heavy = {'torch', 'numpy', 'triton', 'deepspeed', 'vllm', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import torch\n"
        "before = 'triton' in sys.modules\n"
        "for name in rl_core.__all__:\n"
        "    getattr(rl_core, name)\n"
        "rl_core.linear_log_prob(torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(2, dtype=torch.int64))\n"
        "assert before or 'triton' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_kernels_are_not_specialized_on_the_number_of_tokens() -> None:
    """Else each compiles again in the middle of a run, at the first number that is no multiple of 16."""
    pytest.importorskip("triton")
    from rl_core.fused_log_prob import hopper_kernels, triton_kernels

    modules = (hopper_kernels, triton_kernels)
    kernels = [value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")]
    assert len(kernels) == 9
    for kernel in kernels:
        fixed = ("hidden", "weight", "bias", "share", "out")  # of a tensor with rows of 16 bytes or more
        for parameter in getattr(kernel, "params", ()):  # the interpreter's kernels have none
            if parameter.name == "num_tokens":
                assert parameter.do_not_specialize
            elif parameter.name.endswith("_ptr") and not parameter.name.startswith(fixed):
                assert parameter.do_not_specialize_on_alignment, f"{kernel.__name__}: {parameter.name}"
