"""Compares a worker's parameters with a second transfer, byte for byte.

The model's own ``load_weights`` (not the replayed copies, which are thus verified too) assembles every parameter in a
scratch buffer, which is compared with the live parameter. A packed CPU layer is read back by multiplying unit vectors.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReceiverError
from ..plan import Bucket
from ..tensors import slot_view
from .layout import Layout, Target, like
from .scratch import ScratchPool


class Verifier:
    """Compares the buckets of a second pass over the plan."""

    def __init__(self, model: nn.Module, device: torch.device, scratch: ScratchPool) -> None:
        self._model: Any = model
        self._device = device
        self._scratch = scratch
        self._layout = Layout()
        self._left: dict[Target, int] = {}
        self._num_tensors = 0

    def begin(self, layout: Layout) -> None:
        """Start a comparison."""
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
        expected = target.module._parameters[target.name]
        assert expected is not None
        target.module._parameters[target.name] = target.live  # type: ignore[assignment]
        found = target.live.data if target.in_place else self._unpacked(target)
        self._scratch.release(target)
        if found.dtype != expected.dtype or found.shape != expected.shape:
            raise ReceiverError("verify", target.qualname, f"cannot be compared: the server stores it as {found.dtype}")
        wrong = int((found.view(torch.uint8) != expected.data.view(torch.uint8)).sum())
        if wrong:
            raise ReceiverError("verify", target.qualname, f"{wrong} bytes differ from the trainer's")
        for module in self._model.modules() if self._device.type == "cpu" else ():
            is_tied = module is not target.module and module._parameters.get(target.name) is target.live
            has_copy = is_tied and hasattr(module, "cpu_linear")  # a tied output head keeps a packed copy
            if has_copy and not torch.equal(_unpack_cpu_layer(module, target.live), expected):
                raise ReceiverError("verify", target.qualname, "the packed copy in the output head differs")

    def _unpacked(self, target: Target) -> Tensor:
        if self._device.type != "cpu":
            raise ReceiverError("verify", target.qualname, "cannot be compared: the server stores it in another layout")
        return _unpack_cpu_layer(target.module, target.meta)


def _unpack_cpu_layer(module: Any, shaped: Tensor) -> Tensor:
    """A packed weight, read back by multiplying unit vectors. A negative zero is read back as zero."""
    num_inputs = shaped.shape[1]
    found = torch.empty(shaped.shape, dtype=shaped.dtype)
    for start in range(0, num_inputs, 256):
        stop = min(start + 256, num_inputs)
        unit = torch.zeros(stop - start, num_inputs, dtype=shaped.dtype)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        found[:, start:stop] = module.cpu_linear(unit, module._parameters.get("weight"), None).t()
    return found
