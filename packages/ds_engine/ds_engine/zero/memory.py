"""Memory statistics of a rank, and offload of the engine's tensors to CPU memory between phases."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes moved by an offload or reload."""

    moved_bytes: int
    """Bytes copied between device and CPU."""
    device_bytes_before: int
    """Bytes allocated by torch on the device before; 0 on the CPU."""
    device_bytes_after: int
    """Bytes allocated by torch on the device after."""

    @property
    def freed_bytes(self) -> int:
        """Device bytes freed (negative after a reload)."""
        return self.device_bytes_before - self.device_bytes_after


def memory_stats(device: torch.device) -> dict[str, int]:
    """Resident memory of this process, on CUDA also allocated and reserved device memory, each with its peak; bytes."""
    stats = _process_memory()
    if device.type == "cuda":
        stats |= {
            "device_allocated_bytes": torch.cuda.memory_allocated(device),
            "device_reserved_bytes": torch.cuda.memory_reserved(device),
            "device_max_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "device_max_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    return stats


def _process_memory() -> dict[str, int]:
    fields = {"VmRSS": "cpu_resident_bytes", "VmHWM": "cpu_max_resident_bytes"}
    stats = {}
    try:
        with open("/proc/self/status") as status:
            for line in status:
                name, _, value = line.partition(":")
                if name in fields:
                    stats[fields[name]] = int(value.split()[0]) * 1024
    except OSError:  # not Linux: the standard library has the peak only
        import resource

        stats["cpu_max_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return stats


def state_tensors(root: Any, device_type: str, *, depth: int = 4) -> Iterator[Tensor]:
    """Tensors on `device_type` reachable from `root` (a tensor, list, set or dict) within `depth` containers."""
    if isinstance(root, Tensor):
        if root.device.type == device_type:
            yield root
        for name in ("grad", "ds_tensor"):
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
    and no tensor is replaced. The CPU buffers are pinned and reused.
    """

    def __init__(self) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._buffers: dict[int, list[Tensor]] = {}

    @property
    def is_offloaded(self) -> bool:
        """Whether storages are in CPU memory now."""
        return bool(self._offloaded)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages of `tensors` to the CPU and free them on the device; returns the bytes copied."""
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes()
            if num_bytes == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            buffer = self._buffer(num_bytes)
            buffer.copy_(_as_bytes(storage), non_blocking=True)
            self._offloaded.append((storage, buffer))
        torch.cuda.synchronize()
        for storage, _ in self._offloaded:
            storage.resize_(0)
        return sum(buffer.numel() for _, buffer in self._offloaded)

    def reload(self) -> int:
        """Copy the storages back to the device; returns the bytes copied."""
        moved = 0
        for storage, buffer in self._offloaded:
            storage.resize_(buffer.numel())
            _as_bytes(storage).copy_(buffer, non_blocking=True)
            self._buffers.setdefault(buffer.numel(), []).append(buffer)
            moved += buffer.numel()
        self._offloaded.clear()
        torch.cuda.synchronize()
        return moved

    def _buffer(self, num_bytes: int) -> Tensor:
        spare = self._buffers.get(num_bytes)
        return spare.pop() if spare else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


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

    def offload(self, device: torch.device, *, include_params: bool) -> MemoryReport:
        """See `ZeroEngine.offload`."""
        before = _device_bytes(device)
        moved = 0
        if device.type == "cuda" and not self._storages.is_offloaded:
            if self._optimizer is not None:
                self._deepspeed.optimizer.zero_grad()
            moved = self._storages.offload(self._tensors(include_params))
            gc.collect()
            torch.cuda.empty_cache()
        return MemoryReport(moved_bytes=moved, device_bytes_before=before, device_bytes_after=_device_bytes(device))

    def reload(self, device: torch.device) -> MemoryReport:
        """See `ZeroEngine.reload`."""
        before = _device_bytes(device)
        moved = self._storages.reload() if self._storages.is_offloaded else 0
        return MemoryReport(moved_bytes=moved, device_bytes_before=before, device_bytes_after=_device_bytes(device))

    def _tensors(self, include_params: bool) -> Iterator[Tensor]:
        parameters = list(self._module.parameters())
        roots: list[Any] = []
        if self._optimizer is not None:
            roots = [self._optimizer.state, self._optimizer.param_groups, vars(self._deepspeed.optimizer)]
        keep = set()
        if include_params:
            roots.append(parameters)
        else:
            keep = {_storage_id(t) for t in state_tensors(parameters, "cuda")}
        return (t for t in state_tensors(roots, "cuda", depth=6) if _storage_id(t) not in keep)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _device_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
