"""State that a background save copies to host memory during the call and writes later."""

from __future__ import annotations

import copy
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


class HostTree:
    """A copy of a state dict with values of any type; its tensors are in host memory that the next copy reuses.

    Memory for tensors on a CUDA device is pinned. The first copy is slower, since it allocates the memory.
    """

    def __init__(self) -> None:
        self.tree: Any = None
        self._buffers: list[torch.Tensor] = []
        self._num_used = 0
        self._seen: dict[tuple[Any, ...], torch.Tensor] = {}
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: dict[torch.device, torch.cuda.Event] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the copied tensors in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, tree: Any) -> None:
        """Copies everything except host tensors, which `copy` copies.

        Copies from a CUDA device are enqueued on the current stream, so later work on it may change the originals.
        """
        self._num_used, self._seen, self._waiting, self._events = 0, {}, [], {}
        self.tree = self._taken(tree)
        del self._buffers[self._num_used :]
        self._seen = {}

    def copy(self) -> None:
        """Copies the host tensors and waits for the devices; the originals may change afterwards."""
        for buffer, tensor in self._waiting:
            buffer.copy_(tensor)
        self._waiting = []
        for event in self._events.values():
            event.synchronize()
        self._events = {}

    def _taken(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._taken_tensor(value)
        if isinstance(value, dict):
            mapping = copy.copy(value)  # keeps the type and its attributes
            for key in mapping:
                mapping[key] = self._taken(value[key])
            return mapping
        if isinstance(value, Mapping):
            return {key: self._taken(item) for key, item in value.items()}
        if isinstance(value, list):
            return type(value)(self._taken(item) for item in value)
        if isinstance(value, tuple):
            items = [self._taken(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return copy.deepcopy(value)

    def _taken_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        identity = tensor_identity(tensor)
        if tensor.numel() and identity in self._seen:
            return self._seen[identity]
        index, self._num_used = self._num_used, self._num_used + 1
        buffer = self._buffers[index] if index < len(self._buffers) else None
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._buffers[index : index + 1] = [buffer]
        if tensor.is_cuda:
            buffer.copy_(tensor.detach(), non_blocking=True)
            event = self._events.setdefault(tensor.device, torch.cuda.Event())
            event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._waiting.append((buffer, tensor.detach()))
        is_parameter = type(tensor) is torch.nn.Parameter
        self._seen[identity] = torch.nn.Parameter(buffer, tensor.requires_grad) if is_parameter else buffer
        return self._seen[identity]
