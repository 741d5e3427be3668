"""State that a background save copies to host memory during the call and writes later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..digest import FileEntry

if TYPE_CHECKING:
    import torch


class Capture(ABC):
    """State that copies itself to host memory and writes the copy; one object serves all saves.

    Pass it to `AsyncSaver.save` in place of a state dict. `take` runs in the calling thread, on every rank in the same
    order, and may use collectives. `copy` runs in the calling thread or in the background, `write` always in the
    background; neither may use collectives.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the copy in bytes."""

    @abstractmethod
    def take(self) -> None:
        """Record what to save: copy what is small, start to copy or reference what is large."""

    def copy(self) -> None:  # noqa: B027  (a capture that copies everything in `take` needs none)
        """Finish the copies that `take` began; the originals may change after it returns."""

    @abstractmethod
    def write(self, folder: Path, name: str) -> Mapping[str, FileEntry]:
        """Write the copy below the checkpoint's `folder` in files whose names begin with `name`, and fsync them.

        Returns the entries of the files by their path relative to `folder`. Raises CheckpointSpaceError when the disk
        is full.
        """


def tensor_identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that share all their memory, such as tied weights; they are stored once."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class HostCopies:
    """Copies of tensors in host memory: `begin` for every tensor, then `finish`, in the same thread or in another."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: dict[Any, torch.cuda.Event] = {}

    def begin(self, tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        """The tensor that holds the copy once `finish` has returned: `buffer` if its shape and dtype fit.

        A copy from a CUDA device goes to pinned memory and is enqueued on the current stream, so later work on that
        stream may change the original. A copy from host memory waits for `finish`.
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
        """Copy the host tensors and wait for the devices; the originals may change after it returns."""
        for buffer, tensor in self._waiting:
            buffer.copy_(tensor)
        self._waiting = []
        for event in self._events.values():
            event.synchronize()
        self._events = {}
