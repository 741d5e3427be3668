"""CUDA IPC: the workers read the pusher's device buffers in place, on the same GPU or a peer of the same host.

Handles are exchanged over the Unix socket as hexadecimal text, and mappings are kept between syncs. The buffers come
from the CUDA driver and not from torch's allocator: blocks in expandable segments cannot be exported, and an exported
block would stay pinned in the allocator's pool.
"""

import ctypes
import secrets
from typing import Any

import torch
from torch import Tensor

from ..errors import SyncConfigError
from ..plan import BucketPlan
from .base import Receiver, Sender, TransportKind

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class DeviceMemory:
    """Device memory as a uint8 tensor: allocated by this process (``allocate``) or by another one (``open``)."""

    def __init__(self, pointer: int, num_bytes: int, device: torch.device, *, is_owner: bool) -> None:
        self._pointer = pointer
        self._device = device
        self._is_owner = is_owner
        self.bytes_N: Tensor = torch.as_tensor(_CudaArray(pointer, num_bytes))

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> "DeviceMemory":
        """Allocate memory on ``device``. Raises SyncConfigError when the GPU has not enough."""
        pointer = ctypes.c_uint64()
        with torch.cuda.device(device):
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            return cls(int(pointer.value), num_bytes, device, is_owner=True)

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, device: torch.device) -> "DeviceMemory":
        """Map another process's memory, on this GPU or a peer. Raises SyncConfigError when that is impossible."""
        pointer = ctypes.c_uint64()
        exported = _Handle.from_buffer_copy(handle)
        with torch.cuda.device(device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), exported, ctypes.c_uint(_LAZY_PEER_ACCESS))
            return cls(int(pointer.value), num_bytes, device, is_owner=False)

    def handle(self) -> bytes:
        """The 64-byte handle with which another process opens this memory."""
        exported = _Handle()
        with torch.cuda.device(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(exported), ctypes.c_uint64(self._pointer))
        return bytes(exported)

    def close(self) -> None:
        """Free or unmap the memory. Tensors over it must not be used afterwards."""
        if self._pointer:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _call("cuMemFree_v2" if self._is_owner else "cuIpcCloseMemHandle", ctypes.c_uint64(self._pointer))
            self._pointer = 0


class _CudaArray:
    """Raw device memory as an object that torch wraps without a copy (CUDA array interface)."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


_driver: Any = None


def _call(function: str, *args: Any) -> None:
    """Call the CUDA driver in torch's primary context. Raises SyncConfigError with the driver's message."""
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


class IpcSender(Sender):
    """The pusher's end: up to two device buffers, kept between pushes and replaced when a plan needs more."""

    name = "ipc"
    _greeting: dict[str, Any]

    def _allocate(self, sizes: list[int]) -> None:
        self.close()
        self._hold([DeviceMemory.allocate(size, self._device) for size in sizes])
        handles = [[memory.handle().hex(), len(memory.bytes_N)] for memory in self._memory]
        self._greeting = {"buffers": secrets.token_hex(8), "handles": handles}

    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The buffers' handles. Raises SyncConfigError for a worker that is not on a GPU."""
        self._require_gpu(hello)
        return self._greeting, []


class IpcReceiver(Receiver):
    """The worker's end: mappings of the pusher's buffers."""

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        if greeting["buffers"] == self.id:
            return
        self.close()
        handles = greeting["handles"]
        self._hold([DeviceMemory.open(bytes.fromhex(handle), size, self._device) for handle, size in handles])
        self.id = greeting["buffers"]


KIND = TransportKind(
    sender=lambda device, host, config: IpcSender(device),
    receiver=lambda device, timeout_s: IpcReceiver(device),
    one_host="CUDA IPC",
    needs_gpu=True,
    bucket_mib=256,
)
