"""Triton backend: chooses between the Hopper and the portable kernels, and the tile shapes of the portable ones."""

from collections.abc import Callable

import torch
import triton

from . import hopper
from .tiles import TileConfig, Tuner, plan_blocks, plan_groups, sum_bytes, tile_configs
from .triton_backward import backward_blocks, portable_tile_gradient, row_factors, slice_rows
from .triton_forward import MAX_ROWS, forward_rows, portable_tile_stats, tile_buffers
from .types import Gradients, Keeping, LogitInputs, Needs, Reduce, RowGrads, RowStats

# Measured tile shapes, the only state between calls. Not used with ``deterministic``.
_TUNER = Tuner()


class TritonBackend:
    """See :class:`rl_core.fused_log_prob.types.Backend`."""

    def __init__(self, *, deterministic: bool) -> None:
        self.deterministic = deterministic

    def forward(self, inputs: LogitInputs, keeping: Keeping) -> RowStats:
        sample = inputs.rows(slice(MAX_ROWS))

        def launch(config: TileConfig) -> None:
            tiles = tile_buffers(*sample.shape[:2], config.block_n, sample.hidden_NH.device)
            portable_tile_stats(*tiles, sample, config, None)

        # Triton launches on the current device, which may be another one (autograd uses its own threads).
        with torch.cuda.device_of(inputs.hidden_NH):
            return forward_rows(inputs, self._tile("forward", inputs, launch), keeping)

    def backward(self, inputs: LogitInputs, rows: RowGrads, needs: Needs, reduce_hidden: Reduce | None) -> Gradients:
        def launch(config: TileConfig) -> None:
            """The largest block of the backward pass."""
            (num_rows, num_columns, hidden_size), dtype = inputs.shape, inputs.hidden_NH.dtype
            group_rows = plan_groups(num_rows, hidden_size)
            other_bytes = sum_bytes(num_rows, group_rows, hidden_size, dtype.itemsize) if needs.hidden else 0
            num_rows, num_columns = plan_blocks(group_rows, num_columns, dtype.itemsize, other_bytes)
            out_NC = torch.empty(num_rows, num_columns, dtype=dtype, device=inputs.hidden_NH.device)
            factors = slice_rows(row_factors(rows, inputs.spec, dtype), slice(num_rows))
            portable_tile_gradient(out_NC, inputs.rows(slice(num_rows)).columns(0, num_columns), factors, config)

        with torch.cuda.device_of(inputs.hidden_NH):
            return backward_blocks(inputs, rows, needs, self._tile("backward", inputs, launch), reduce_hidden)

    def _tile(self, name: str, inputs: LogitInputs, launch: Callable[[TileConfig], object]) -> TileConfig | None:
        """The fastest tile, or the default one if deterministic or if measuring is not possible; None where the Hopper
        kernels run."""
        if hopper.supports(inputs):
            return None
        hidden_NH, (num_rows, num_columns, hidden_size) = inputs.hidden_NH, inputs.shape
        capability = torch.cuda.get_device_capability(hidden_NH.device) if hidden_NH.is_cuda else None
        candidates = tile_configs(hidden_NH.dtype, capability)
        if self.deterministic or capability is None or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        size = triton.next_power_of_2(num_rows), num_columns, hidden_size
        flags = hidden_NH.dtype, inputs.bias_V is not None, inputs.spec.soft_cap is not None
        return _TUNER.choose((name, hidden_NH.device, *size, *flags), candidates, launch)
