"""Launchers of the warp-specialized Hopper kernels, and the conditions for using them."""

import functools
import math
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from .types import LogitInputs, ShareOutput

GROUP_BYTES = 12 * 2**20  # of hidden, in the row blocks of one tile group, which must stay in the L2 cache
TESTED_TRITON = ((3, 6), (3, 6))  # Gluon is experimental: other versions of Triton run the portable kernels
BLOCK_N = 256
# The tensor cores truncate instead of round the float32 sum after every step of 16 elements. This biases sums toward
# zero, by a relative error that grows with the number of steps. Measured on an H200 for H from 256 to 8192 with dense
# normal inputs: 0.93e-9 to 0.98e-9 per element; 1.1e-9 to 1.3e-9 with a few outlier dimensions, 0.1e-9 where 95% of
# hidden are zeros (few nonzero products, whose sum is exact). docs/rl_core.md lists the remaining errors.
TRUNCATION_BIAS = 0.97e-9


@functools.cache
def _gluon_usable() -> bool:
    if find_spec("triton") is None or find_spec("triton.experimental.gluon") is None:
        return False
    import triton

    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return TESTED_TRITON[0] <= (major, minor) <= TESTED_TRITON[1]


def supports(inputs: LogitInputs) -> bool:
    """True if the Hopper kernels support these inputs; otherwise the portable kernels run."""
    hidden_NH, weight_VH = inputs.hidden_NH, inputs.weight_VH
    return (
        hidden_NH.is_cuda
        and hidden_NH.dtype in (torch.bfloat16, torch.float16)
        and inputs.bias_V is None
        and inputs.spec.soft_cap is None
        and hidden_NH.shape[1] % 8 == 0  # TMA needs rows of a multiple of 16 bytes
        and hidden_NH.data_ptr() % 16 == 0
        and weight_VH.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(hidden_NH.device) == (9, 0)
        and _gluon_usable()
    )


def _grid(consumers: int, hidden_NH: Tensor, num_columns: int) -> tuple[int, int]:
    """Number of programs and hopper_kernels' ``group_m``."""
    block_rows = 64 * consumers
    tiles = math.ceil(hidden_NH.shape[0] / block_rows) * math.ceil(num_columns / BLOCK_N)
    programs = min(torch.cuda.get_device_properties(hidden_NH.device).multi_processor_count, tiles)
    return programs, max(4, GROUP_BYTES // (block_rows * hidden_NH.shape[1] * hidden_NH.dtype.itemsize))


@functools.cache
def _box_layout(dtype: torch.dtype, block_rows: int) -> object:
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([block_rows, 64], element)


def _descriptor(matrix: Tensor, block_rows: int) -> object:
    """TMA descriptor of 64-column boxes with the 128-byte swizzle, passed as a kernel argument."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _box_layout(matrix.dtype, block_rows)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block_rows, 64], layout)


def corrected(inputs: LogitInputs) -> LogitInputs:
    """``inputs`` with a temperature that corrects the bias of the tensor cores (TRUNCATION_BIAS) in every logit."""
    temperature = inputs.spec.temperature / (1.0 + TRUNCATION_BIAS * inputs.shape[2])
    return replace(inputs, spec=replace(inputs.spec, temperature=temperature))


def tile_stats(lse: Tensor, entropy: Tensor, inputs: LogitInputs, share: ShareOutput | None) -> None:
    """Fill ``[tiles, N]`` log2-sum-exp2 and entropy in bits of every 256-column tile, and ``share`` (types.Kept)."""
    from .hopper_kernels import stats_kernel

    hidden_NH, (num_rows, num_columns, hidden_size) = inputs.hidden_NH, inputs.shape
    consumers = 3 if share is None else 2  # keeping needs more registers than three consumers have
    programs, group_m = _grid(consumers, hidden_NH, num_columns)
    stats_kernel[(programs,)](
        _descriptor(hidden_NH, 64), _descriptor(inputs.weight_VH, 256),
        _descriptor(hidden_NH if share is None else share.out_NC, 64), lse if share is None else share.reference_N,
        lse, entropy, num_rows, num_columns, hidden_size, inputs.spec.bits, group_m, KEEP=share is not None,
        CONSUMERS=consumers, STAGES=4, num_warps=4,
    )  # fmt: skip


def tile_gradient(out_NC: Tensor, inputs: LogitInputs, lse_N: Tensor, alpha_N: Tensor, beta_N: Tensor | None) -> None:
    """Fill ``out`` with da, except the entries of the targets; see hopper_kernels.gradient_kernel."""
    from .hopper_kernels import gradient_kernel

    num_rows, num_columns, hidden_size = inputs.shape
    programs, group_m = _grid(3, inputs.hidden_NH, num_columns)
    gradient_kernel[(programs,)](
        _descriptor(inputs.hidden_NH, 64), _descriptor(inputs.weight_VH, 256), _descriptor(out_NC, 64), lse_N, alpha_N,
        alpha_N if beta_N is None else beta_N, num_rows, num_columns, hidden_size, inputs.spec.bits, group_m,
        HAS_BETA=beta_N is not None, STAGES=3, num_warps=4,
    )  # fmt: skip
