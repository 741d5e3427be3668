"""The interface of a tensor source, and what the sources share.

A source lists its tensors once (``manifest``) and then fills buckets on request. ``fill`` is a collective: every rank
calls it for every bucket in the same order, and only the sending rank passes ``out``.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from ..manifest import WeightManifest
from ..plan import Bucket


class TensorSource(Protocol):
    """The trainer's weights, as the pusher reads them."""

    def manifest(self) -> WeightManifest:
        """The tensors, by Hugging Face name, in sending order. The same on every rank."""

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """Write the bucket's tensors into ``out`` (uint8, 1-D, at least ``bucket.nbytes`` long, any device).

        Every rank calls it; ``out`` is None on ranks that do not send. The bytes are in place when it returns, or the
        copies are enqueued on the current stream of ``out``'s device. Raises SourceError.
        """


class Staging:
    """Assembles a bucket on the device of its tensors (``like``) and copies it to ``out`` on exit.

    ``bytes_N`` is the buffer to write: ``out`` itself when it is on the same kind of device, None when ``out`` is None.
    """

    def __init__(self, bucket: Bucket, out: Tensor | None, like: Tensor) -> None:
        self._bucket = bucket
        self._out = out
        self.bytes_N = out
        if out is not None and out.device.type != like.device.type:
            self.bytes_N = torch.empty(bucket.nbytes, dtype=torch.uint8, device=like.device)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, exc_type: object, *rest: object) -> None:
        if exc_type is None and self._out is not None and self.bytes_N is not None and self.bytes_N is not self._out:
            self._out[: self._bucket.nbytes].copy_(self.bytes_N)


def wire_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent: ``dtype``, if given, for floating-point parameters; buffers keep theirs."""
    is_cast = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.dtype.is_floating_point
    return dtype if dtype is not None and is_cast else tensor.dtype


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones under their first name, and persistent buffers, such as the bias of DeepSeek-V3's router.

    Under transformers' names, which differ from those of the model folder where experts are fused.
    """
    saved = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return dict(module.named_parameters()) | buffers
