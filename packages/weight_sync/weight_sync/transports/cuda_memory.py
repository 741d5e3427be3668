"""Device memory that other processes can open: allocation, export and import through the CUDA driver.

Not torch's allocator: its blocks cannot be exported when it uses expandable segments, and an exported block would stay
pinned in its pool. Handles are 64 plain bytes, so nothing needs to be pickled.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..errors import SyncConfigError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class DeviceMemory:
    """A block of device memory as a uint8 tensor: our own (``allocate``) or another process's (``open``)."""

    def __init__(self, pointer: int, num_bytes: int, device: torch.device, *, ours: bool) -> None:
        self.num_bytes = num_bytes
        self._pointer = pointer
        self._device = device
        self._ours = ours
        self.bytes_N: Tensor = torch.as_tensor(_Exposed(pointer, num_bytes))

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> "DeviceMemory":
        """New memory on ``device``. Raises SyncConfigError when the GPU has no room."""
        pointer = ctypes.c_uint64()
        with torch.cuda.device(device):
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            return cls(int(pointer.value), num_bytes, device, ours=True)

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, device: torch.device) -> "DeviceMemory":
        """Another process's memory, on this GPU or a peer of it. Raises SyncConfigError when it cannot be reached."""
        pointer = ctypes.c_uint64()
        exported = _Handle.from_buffer_copy(handle)
        with torch.cuda.device(device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), exported, ctypes.c_uint(_LAZY_PEER_ACCESS))
            return cls(int(pointer.value), num_bytes, device, ours=False)

    def handle(self) -> bytes:
        """What another process needs to open this memory."""
        exported = _Handle()
        with torch.cuda.device(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(exported), ctypes.c_uint64(self._pointer))
        return bytes(exported)

    def close(self) -> None:
        """Free or unmap. Tensors over it must no longer be used."""
        if self._pointer:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _call("cuMemFree_v2" if self._ours else "cuIpcCloseMemHandle", ctypes.c_uint64(self._pointer))
            self._pointer = 0


class _Exposed:
    """Raw device memory in the form torch adopts without a copy."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


_driver: Any = None


def _call(function: str, *args: Any) -> None:
    """One driver call in torch's primary context. Raises SyncConfigError with the driver's own words."""
    global _driver
    if _driver is None:
        torch.cuda.init()
        _driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()  # makes the primary context current on this thread
    code = getattr(_driver, function)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver.cuGetErrorString(code, ctypes.byref(text))
        raise SyncConfigError(f"{function} failed: {(text.value or b'unknown error').decode()} ({code})")
