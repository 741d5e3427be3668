"""The interface of a tensor source, and what the sources share.

A source lists its tensors once (``manifest``) and then fills buckets on request. ``fill`` is a collective: every rank
calls it for every bucket in the same order, and only the sending rank passes ``out``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def staged(bucket: Bucket, out: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Context with the buffer in which to assemble a bucket on ``device``; it is copied to ``out`` at the end.

    The buffer is ``out`` itself where that is on the same kind of device.
    """
    if out.device.type == device.type:
        yield out
    else:
        bytes_N = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        yield bytes_N
        out[: bucket.nbytes].copy_(bytes_N)


def wire_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent: ``dtype``, if given, for floating-point parameters; buffers keep theirs."""
    is_cast = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.dtype.is_floating_point
    return dtype if dtype is not None and is_cast else tensor.dtype


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones under their first name, and persistent buffers, such as the bias of DeepSeek-V3's router.

    Under transformers' names, which differ from those of the model folder where experts are fused.
    """
    buffers = {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }
    return dict(module.named_parameters()) | buffers
