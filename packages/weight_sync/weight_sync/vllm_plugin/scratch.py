"""Scratch buffers in which parameters are assembled. Few are needed, because layers arrive one after another."""

import torch
from torch import Tensor

from .layout import Target


class ScratchPool:
    """Buffers on the model's device, one per target while it is assembled, and reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._used: dict[Target, Tensor] = {}

    def acquire(self, target: Target) -> Tensor:
        """A flat buffer with the target's dtype and number of elements; contents undefined."""
        nbytes = target.meta.numel() * target.meta.element_size()
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not buffer]
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._used[target] = buffer
        return buffer[:nbytes].view(target.meta.dtype)

    def release(self, target: Target) -> None:
        """Return the target's buffer to the pool."""
        self._free.append(self._used.pop(target))

    def users(self) -> list[Target]:
        """Targets that hold a buffer."""
        return list(self._used)

    def trim(self) -> None:
        """Free the buffers that no target holds."""
        self._free = []

    def __contains__(self, target: Target) -> bool:
        return target in self._used
