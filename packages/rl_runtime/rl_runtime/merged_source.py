"""What the servers are sent when an engine trains adapters: each weight with its adapter merged in."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ds_engine.export import NamedTensor
from weight_sync.manifest import Manifest, TensorEntry
from weight_sync.plan import Bucket
from weight_sync.sources import dtype_name, slot_view


class MergedSource:
    """A weight source over `ZeroEngine.whole_tensors()`: Hugging Face names, base + scale * B @ A.

    Servers then serve plain weights and need to know nothing of adapters. Every rank calls `fill` for every bucket in
    order; at stage 3 it gathers tensor by tensor.
    """

    def __init__(self, tensors: Sequence[NamedTensor]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def manifest(self) -> Manifest:
        """Names, full shapes and dtypes, in the model's order."""
        return Manifest.of(
            TensorEntry(
                name=name,
                shape=tuple(getattr(tensor.parameter, "ds_shape", tensor.parameter.shape)),
                dtype=dtype_name(tensor.parameter.dtype),
                padding=0,
            )
            for name, tensor in self._tensors.items()
        )

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """See weight_sync.WeightSource."""
        with torch.no_grad():
            for slot in bucket.slots:
                tensor = self._tensors[slot.name]
                with _whole(tensor):
                    if out is not None:
                        slot_view(out, slot).copy_(tensor.value())


def _whole(tensor: NamedTensor) -> AbstractContextManager[Any]:
    """Inside, every part of the tensor is whole on this rank; a collective at stage 3."""
    if not any(hasattr(part, "ds_tensor") for part in tensor.parts):
        return nullcontext()
    import deepspeed

    return cast("AbstractContextManager[Any]", deepspeed.zero.GatheredParameters(tensor.parts))
