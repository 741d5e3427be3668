"""Source for a plain module or an FSDP2 module."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import SourceError
from ..manifest import TensorEntry, WeightManifest
from ..plan import Bucket
from ..tensors import dtype_name, slot_view
from .base import named_tensors, staged, wire_dtype


class ModuleSource:
    """Parameters and persistent buffers of a module: full on every rank, or DTensors (FSDP2), gathered one by one.

    ``dtype`` casts floating-point parameters before sending. ``rename`` maps the module's names to the names to send
    and skips a parameter by returning None. Tied parameters appear once, under their first name.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None = None, rename: Callable[[str], str | None] | None = None
    ) -> None:
        self._dtype = dtype
        self._module = module
        self._rename = rename or (lambda name: name)
        self._params: dict[str, Tensor] = {}

    def manifest(self) -> WeightManifest:
        """Names, full shapes and wire dtypes of the module's parameters."""
        return WeightManifest.of(
            TensorEntry(name=name, shape=tuple(param.shape), dtype=dtype_name(wire_dtype(param, self._dtype)))
            for name, param in self._named().items()
        )

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """Raises SourceError when a parameter is gone or has another shape than planned."""
        if bucket.index == 0 or not self._params:
            self._params = self._named()  # once per push: walking a large module takes a millisecond
        params = [self._params.get(slot.name) for slot in bucket.slots]
        full_params: list[Tensor] = []
        with torch.no_grad():
            for slot, param in zip(bucket.slots, params, strict=True):
                if param is None or tuple(param.shape) != slot.shape:
                    shape = None if param is None else tuple(param.shape)
                    raise SourceError(field=slot.name, value=shape, allowed=f"shape {slot.shape}, as planned")
                full = param.full_tensor() if hasattr(param, "full_tensor") else param
                if out is not None:
                    full_params.append(full.detach())
            if out is not None:
                with staged(bucket, out, full_params[0].device) as bytes_N:
                    torch._foreach_copy_([slot_view(bytes_N, slot) for slot in bucket.slots], full_params)

    def _named(self) -> dict[str, Tensor]:
        named = ((self._rename(name), tensor) for name, tensor in named_tensors(self._module).items())
        return {name: tensor for name, tensor in named if name is not None}
