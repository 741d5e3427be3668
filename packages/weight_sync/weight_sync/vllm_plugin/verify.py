"""Compares a worker's weights with a second transfer, byte for byte.

The model's own ``load_weights`` (not the replayed copies, which are thus verified too) assembles every parameter in a
scratch buffer. Where vLLM processes weights after loading, a copy of the module is processed in the same way from these
buffers; the results are compared with the live tensors. A packed CPU layer is read back by multiplying
unit vectors.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReceiverError
from ..plan import Bucket
from ..tensors import like, num_wrong_bytes, slot_view, synchronize
from .layout import Arrivals, Layout, ScratchPool, Target
from .processing import difference, known_record, processed, record_of


class Verifier:
    """Compares the buckets of a second pass over the plan."""

    def __init__(self, model: nn.Module, device: torch.device, scratch: ScratchPool, layout: Layout) -> None:
        self._model: Any = model
        self._device = device
        self._scratch = scratch
        self._layout = layout
        self._arrivals = Arrivals(layout)
        self._num_tensors = 0

    @torch.no_grad()
    def verify(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Compare the parameters that this bucket completes; its memory may be reused when this returns.

        Raises ReceiverError('verify', name, ...) at the first difference.
        """
        self._compare_bucket(bucket, bytes_N)
        synchronize(self._device)  # no comparison waits for the copies of a bucket that completes no parameter

    def _compare_bucket(self, bucket: Bucket, bytes_N: Tensor) -> None:
        copies = self._layout.copies_of(bucket)
        for copy in copies:
            if copy.target not in self._scratch:
                scratch = like(copy.target.meta, self._scratch.acquire(copy.target))
                copy.target.module._parameters[copy.target.name] = scratch  # type: ignore[assignment]
        self._model.load_weights((slot.name, slot_view(bytes_N, slot)) for slot in bucket.slots)
        for copy in copies:
            if targets := self._arrivals.completed_by(copy):
                self._compare(targets)
        self._num_tensors += len(bucket.slots)

    def finish(self) -> int:
        """The number of tensors compared. Raises ReceiverError('count' or 'verify', name, ...)."""
        self._arrivals.check_complete("were not compared")
        self._scratch.trim()
        for name, module in self._model.named_modules():
            record = record_of(module)
            if record is not None and not record.changed and (record.derived or record.copies):
                self._compare_module(name, module, {})
        return self._num_tensors

    def _compare(self, targets: list[Target]) -> None:
        module = targets[0].module
        raw = {target.name: module._parameters[target.name] for target in targets}
        for target in targets:
            module._parameters[target.name] = target.live  # type: ignore[assignment]
            self._scratch.release(target)
        (target, *_) = targets
        expected = raw[target.name]
        assert expected is not None
        if not target.in_place:
            self._compare_module(target.qualname, module, raw)
            return
        live = target.live.data
        if live.dtype != expected.dtype or live.shape != expected.shape:
            raise ReceiverError("verify", target.qualname, f"cannot be compared: the server stores it as {live.dtype}")
        if wrong := num_wrong_bytes(live, expected.data):
            raise ReceiverError("verify", target.qualname, f"{wrong} bytes differ from the trainer's")

    def _compare_module(self, qualname: str, module: nn.Module, raw: dict[str, Any]) -> None:
        """Compare what a processed module computes with; ``raw``: its unprocessed parameters that it does not keep."""
        record = known_record(module)
        if record.problem:
            raise ReceiverError("verify", qualname, f"cannot be compared: {record.problem}")
        wrong = difference(module, processed(module, raw))
        weight = raw.get("weight", module._parameters.get("weight"))
        if "cpu_linear" in record.copies and getattr(module, "cpu_linear", None) is not nn.functional.linear:
            assert weight is not None
            num_wrong = int((_unpack_cpu_layer(module, weight) != weight).sum())
            wrong = wrong or (num_wrong and f"{num_wrong} elements of the packed weight") or ""
        if wrong:
            raise ReceiverError("verify", qualname, f"{wrong} differ from the trainer's")


def _unpack_cpu_layer(module: Any, shaped: Tensor) -> Tensor:
    """A packed weight, read back by multiplying unit vectors. A negative zero is read back as zero."""
    num_inputs = shaped.shape[1]
    weight_OI = torch.empty(shaped.shape, dtype=shaped.dtype)
    for start in range(0, num_inputs, 256):
        stop = min(start + 256, num_inputs)
        unit = torch.zeros(stop - start, num_inputs, dtype=shaped.dtype)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        weight_OI[:, start:stop] = module.cpu_linear(unit, module._parameters.get("weight"), None).t()
    return weight_OI
