"""Comparing what a worker's layers hold with a second sending, byte for byte.

Every parameter is assembled apart from the model by the model's own ``load_weights`` (not by the replayed copies, so
that these are checked too) and compared with the live one. A packed CPU layer is read back through what it multiplies.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReceiverError
from ..plan import Bucket
from ..sources.base import slot_view
from .layout import Layout, Target, like
from .scratch import ScratchPool


class Verifier:
    """Takes the buckets of a second pass over the plan."""

    def __init__(self, model: nn.Module, device: torch.device, scratch: ScratchPool) -> None:
        self._model: Any = model
        self._device = device
        self._scratch = scratch
        self._layout = Layout()
        self._left: dict[Target, int] = {}
        self._num_tensors = 0

    def begin(self, layout: Layout) -> None:
        """A new comparison."""
        self._layout = layout
        self._left = {target: target.received for target in layout.targets}
        self._num_tensors = 0

    def verify(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Compare the parameters that this bucket completes. Raises ReceiverError('verify', name, ...)."""
        copies = [copy for slot in bucket.slots for copy in self._layout.copies[slot.name]]
        for copy in copies:
            if copy.target not in self._scratch:
                scratch = like(copy.target.meta, self._scratch.acquire(copy.target))
                copy.target.module._parameters[copy.target.name] = scratch  # type: ignore[assignment]
        self._model.load_weights((slot.name, slot_view(bytes_N, slot)) for slot in bucket.slots)
        for copy in copies:
            self._left[copy.target] -= copy.numel
            if self._left[copy.target] == 0:
                self._compare(copy.target)
        self._num_tensors += len(bucket.slots)

    def finish(self) -> int:
        """The number of tensors compared. Raises ReceiverError('count', name, ...)."""
        for target, left in self._left.items():
            if left:
                raise ReceiverError("count", target.qualname, f"{left} elements were not compared")
        self._scratch.trim()
        return self._num_tensors

    def _compare(self, target: Target) -> None:
        wanted = target.module._parameters[target.name]
        assert wanted is not None
        target.module._parameters[target.name] = target.live  # type: ignore[assignment]
        found = target.live.data if target.in_place else self._unpacked(target)
        self._scratch.release(target)
        if found.dtype != wanted.dtype or found.shape != wanted.shape:
            raise ReceiverError("verify", target.qualname, f"cannot be compared: the server keeps it as {found.dtype}")
        wrong = int((found.view(torch.uint8) != wanted.data.view(torch.uint8)).sum())
        if wrong:
            raise ReceiverError("verify", target.qualname, f"{wrong} bytes differ from the trainer's")
        for module in self._model.modules():
            if module is not target.module and module._parameters.get(target.name) is target.live:
                self._compare_head(module, target, wanted)

    def _compare_head(self, module: nn.Module, target: Target, wanted: Tensor) -> None:
        """A head that shares its weight keeps a packed copy of its own on the CPU."""
        if self._device.type != "cpu" or not hasattr(module, "cpu_linear"):
            return
        if not torch.equal(_through(module, target.live), wanted):
            raise ReceiverError("verify", target.qualname, "the packed copy in the output head differs")

    def _unpacked(self, target: Target) -> Tensor:
        if self._device.type != "cpu":
            raise ReceiverError("verify", target.qualname, "cannot be compared: the server keeps it in another form")
        return _through(target.module, target.meta)


def _through(module: Any, shaped: Tensor) -> Tensor:
    """A packed weight, read back as what it does to the unit vectors. A negative zero comes back as zero."""
    num_inputs = shaped.shape[1]
    found = torch.empty(shaped.shape, dtype=shaped.dtype)
    for start in range(0, num_inputs, 256):
        stop = min(start + 256, num_inputs)
        unit = torch.zeros(stop - start, num_inputs, dtype=shaped.dtype)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        found[:, start:stop] = module.cpu_linear(unit, module._parameters.get("weight"), None).t()
    return found
