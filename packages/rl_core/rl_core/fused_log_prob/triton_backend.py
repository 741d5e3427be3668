"""Triton backend: chooses between the Hopper and the portable kernels, and the tile shapes of the portable ones."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from . import hopper
from .tiles import TileConfig, Tuner, plan_blocks, plan_groups, sum_bytes, tile_configs
from .triton_backward import backward_blocks, portable_tile_gradient, row_factors, slice_rows
from .triton_forward import MAX_ROWS, forward_rows, portable_tile_stats, tile_buffers
from .types import KEEP_NOTHING, Gradients, Keeping, LogitSpec, Needs, Reduce, RowGrads, RowStats

# Measured tile shapes, the only state between calls. Not used with ``deterministic``.
_TUNER = Tuner()


class TritonBackend:
    """See :class:`rl_core.fused_log_prob.types.Backend`. ``allow_hopper=False`` uses only the portable kernels."""

    def __init__(self, *, deterministic: bool = False, allow_hopper: bool = True) -> None:
        self.deterministic = deterministic
        self.allow_hopper = allow_hopper

    def forward(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        spec: LogitSpec,
        keeping: Keeping = KEEP_NOTHING,
    ) -> RowStats:
        # Triton launches on the current device, which may be another one (autograd uses its own threads).
        with torch.cuda.device_of(hidden_NH):
            config = None
            if not (self.allow_hopper and hopper.supports(hidden_NH, weight_VH, bias_V, spec)):
                sample_NH = hidden_NH[:MAX_ROWS]

                def launch(config: TileConfig) -> None:
                    tiles = tile_buffers(sample_NH.shape[0], weight_VH.shape[0], config.block_n, sample_NH.device)
                    portable_tile_stats(*tiles, sample_NH, weight_VH, bias_V, spec, config, None)

                config = self._tile("forward", hidden_NH, weight_VH, bias_V, spec, launch)
            return forward_rows(hidden_NH, weight_VH, bias_V, targets_N, spec, config, keeping)

    def backward(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        spec: LogitSpec,
        rows: RowGrads,
        needs: Needs,
        reduce_hidden: Reduce | None = None,
    ) -> Gradients:
        with torch.cuda.device_of(hidden_NH):
            config = None
            if not (self.allow_hopper and hopper.supports(hidden_NH, weight_VH, bias_V, spec)):
                config = self._gradient_tile(hidden_NH, weight_VH, bias_V, spec, rows, needs)
            return backward_blocks(hidden_NH, weight_VH, bias_V, targets_N, spec, rows, needs, config, reduce_hidden)

    def _gradient_tile(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, spec: LogitSpec, rows: RowGrads, needs: Needs
    ) -> TileConfig:
        group_rows = plan_groups(*hidden_NH.shape)
        other_bytes = sum_bytes(hidden_NH.shape[0], group_rows, hidden_NH.shape[1], hidden_NH.dtype.itemsize)
        num_rows, num_columns = plan_blocks(
            group_rows, weight_VH.shape[0], hidden_NH.dtype.itemsize, other_bytes if needs.hidden else 0
        )

        def launch(config: TileConfig) -> None:
            out_NC = torch.empty(num_rows, num_columns, dtype=hidden_NH.dtype, device=hidden_NH.device)
            factors = slice_rows(row_factors(rows, spec, hidden_NH.dtype), slice(0, num_rows))
            bias_C = None if bias_V is None else bias_V[:num_columns]
            portable_tile_gradient(out_NC, hidden_NH[:num_rows], weight_VH[:num_columns], bias_C, factors, spec, config)

        return self._tile("backward", hidden_NH, weight_VH, bias_V, spec, launch)

    def _tile(
        self,
        name: str,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        spec: LogitSpec,
        launch: Callable[[TileConfig], object],
    ) -> TileConfig:
        """The fastest tile, or the default one if deterministic or if measuring is not possible."""
        capability = torch.cuda.get_device_capability(hidden_NH.device) if hidden_NH.is_cuda else None
        candidates = tile_configs(hidden_NH.dtype, capability)
        if self.deterministic or capability is None or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        size = triton.next_power_of_2(hidden_NH.shape[0]), weight_VH.shape[0], hidden_NH.shape[1]
        flags = hidden_NH.dtype, bias_V is not None, spec.soft_cap is not None
        return _TUNER.choose((name, hidden_NH.device, *size, *flags), candidates, launch)
