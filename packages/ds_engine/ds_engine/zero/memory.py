"""Offload of the engine's tensors to CPU memory between phases."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK_BYTES = 2**28
"""Bytes of CPU memory that an offload allocates at a time."""


def state_tensors(root: Any, device_type: str, *, depth: int = 4) -> Iterator[Tensor]:
    """Tensors on `device_type` reachable from `root` (a tensor, list, set or dict) within `depth` containers."""
    if isinstance(root, Tensor):
        if root.device.type == device_type:
            yield root
        for name in ("grad", "ds_tensor", "ds_secondary_tensor"):
            # .grad of a non-leaf tensor warns.
            inner = getattr(root, name, None) if name != "grad" or root.is_leaf else None
            if isinstance(inner, Tensor):
                yield from state_tensors(inner, device_type, depth=0)
        return
    if depth == 0:
        return
    children: Iterable[Any]
    if isinstance(root, dict):
        children = list(root.values()) + [key for key in root if isinstance(key, Tensor)]
    elif isinstance(root, list | tuple | set):
        children = root
    else:
        return
    for child in children:
        yield from state_tensors(child, device_type, depth=depth - 1)


class StorageOffload:
    """Moves tensor storages to CPU memory and back.

    All views, references and flat buffers that DeepSpeed holds stay valid at every stage, because storages are resized
    and no tensor is replaced. The CPU memory is pinned for CUDA storages, and reused.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        self._host = _HostMemory(chunk_bytes)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages of `tensors` to the CPU and free them on the device; returns the bytes copied."""
        seen: set[int] = set()
        end = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes()
            if num_bytes == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            for piece, copy in self._host.pieces(end, _as_bytes(storage)):
                copy.copy_(piece, non_blocking=True)
            self._offloaded.append((storage, num_bytes))
            end += num_bytes
        _synchronize()
        for storage, _ in self._offloaded:
            storage.resize_(0)
        return end

    def reload(self) -> int:
        """Copy the storages back to the device; returns the bytes copied."""
        end = 0
        for storage, num_bytes in self._offloaded:
            storage.resize_(num_bytes)
            for piece, copy in self._host.pieces(end, _as_bytes(storage)):
                piece.copy_(copy, non_blocking=True)
            end += num_bytes
        self._offloaded.clear()
        _synchronize()
        return end


class _HostMemory:
    """A range of CPU memory in chunks of one size, allocated at first use and kept.

    torch rounds a pinned allocation up to a power of two: one buffer of 33 GB would take 64 GiB.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    def pieces(self, start: int, bytes_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of `bytes_N`, its place in this memory); the first byte's place is `start`."""
        done = 0
        while done < bytes_N.numel():
            index, offset = divmod(start + done, self._chunk_bytes)
            size = min(self._chunk_bytes - offset, bytes_N.numel() - done)
            if index == len(self._chunks):
                is_pinned = bytes_N.device.type == "cuda"
                self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=is_pinned))
            yield bytes_N[done : done + size], self._chunks[index][offset : offset + size]
            done += size


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class EngineMemory:
    """Offload and reload of one engine's tensors."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, deepspeed_engine: Any) -> None:
        """`optimizer` is None for a frozen model."""
        self._module = module
        self._optimizer = optimizer
        self._deepspeed = deepspeed_engine
        self._storages = StorageOffload()
        self.is_offloaded = False
        """True if `offload` was called and `reload` was not; on the CPU too, where neither moves anything."""

    def offload(self, device: torch.device, *, include_params: bool) -> int:
        """See `ZeroEngine.offload`."""
        num_bytes = 0
        if device.type == "cuda" and not self.is_offloaded:
            if self._optimizer is not None:
                self._deepspeed.optimizer.zero_grad()
            num_bytes = self._storages.offload(self.movable(device.type, include_params=include_params))
            gc.collect()
            torch.cuda.empty_cache()
        self.is_offloaded = True
        return num_bytes

    def reload(self) -> int:
        """See `ZeroEngine.reload`."""
        self.is_offloaded = False
        return self._storages.reload()

    def movable(self, device_type: str, *, include_params: bool) -> Iterator[Tensor]:
        """The tensors on `device_type` that `offload` moves."""
        parameters = list(self._module.parameters())
        roots: list[Any] = []
        if self._optimizer is not None:
            roots = [self._optimizer.state, self._optimizer.param_groups, vars(self._deepspeed.optimizer)]
        keep = set()
        if include_params:
            roots.append(parameters)
        else:
            keep = {_storage_id(t) for t in state_tensors(parameters, device_type)}
        return (t for t in state_tensors(roots, device_type, depth=6) if _storage_id(t) not in keep)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
