"""Copies of tensors in host memory, begun where the originals are at rest and finished before they change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["HostCopying"]


class HostCopying:
    """One round of copies: `begin` for every tensor, then `finish`, in the same thread or in another."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: dict[Any, torch.cuda.Event] = {}

    def begin(self, tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        """The tensor that holds the copy once `finish` has returned: `buffer`, where it fits.

        A copy from a CUDA device is enqueued on its current stream, so that later work there finds the original free;
        it goes to pinned memory. One from host memory waits for `finish`.
        """
        import torch

        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            buffer.copy_(tensor.detach(), non_blocking=True)
            event = self._events.setdefault(tensor.device, torch.cuda.Event())
            event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._waiting.append((buffer, tensor.detach()))
        return buffer

    def finish(self) -> None:
        """Copy what is left and wait for the devices; when it returns, the originals may change."""
        for buffer, tensor in self._waiting:
            buffer.copy_(tensor)
        self._waiting = []
        for event in self._events.values():
            event.synchronize()
        self._events = {}
