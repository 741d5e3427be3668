"""The layout of a plan's tensors in the model, determined by a dry run before any weights are sent.

The dry run calls the model's own ``load_weights`` on meta tensors, with every parameter replaced by a meta copy, and
records every copy that the weight loaders make. It rejects a wrong name, a wrong shape and a parameter that receives
nothing. Replaying the recorded copies on real memory loads the weights without running the loaders' Python code.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from ..errors import ReceiverError
from ..plan import Bucket, BucketPlan, Slot
from ..tensors import dtype_name, like, storage_id, torch_dtype
from .patch import FENCE
from .processing import known_record, layout_of, record_of

_RELOAD = "vllm.model_executor.model_loader.reload"

PATCH = FENCE.patch(
    name="plan check",
    reason="runs the model's weight loaders on meta tensors, with the layout that they expect",
    otherwise="refused",
    reads={
        f"{_RELOAD}.layerwise": ("get_layerwise_info(layer, ...)",),
        f"{_RELOAD}.types:LayerReloadingInfo": ("restore_metadata",),
        f"{_RELOAD}.sanitize": ("restore_layer_refs(tensor, layer, ...)",),
        "vllm.model_executor.layers.vocab_parallel_embedding": ("VocabParallelEmbedding", "ParallelLMHead"),
    },
)


@dataclass(eq=False)
class Target:
    """One parameter of the model: ``meta`` has the layout that its weight loader expects, ``live`` is in use."""

    module: nn.Module
    name: str
    qualname: str
    meta: Tensor
    live: Tensor
    is_derived: bool
    """True if vLLM computes it from other parameters (MLA's W_UV and W_UK_T)."""

    is_processed: bool
    """True if vLLM's processing after loading changed it."""

    received: int = 0
    """Number of elements that the plan's tensors write into it."""

    @property
    def in_place(self) -> bool:
        """True if received bytes may be written into the live parameter."""
        same = self.live.shape == self.meta.shape and self.live.stride() == self.meta.stride()
        return same and self.live.numel() > 0 and not self.is_processed


@dataclass(frozen=True, eq=False)
class Copy:
    """One copy of a weight loader: part of a received tensor into part of a parameter. Units are elements."""

    target: Target
    to_view: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, stride and offset within the parameter."""
    from_view: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, stride and offset within the received tensor."""

    @property
    def numel(self) -> int:
        """Number of elements written."""
        return prod(self.to_view[0])


@dataclass
class Layout:
    """The copies that load one plan's tensors into the model."""

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    """By tensor name."""

    targets: list[Target] = field(default_factory=list)

    replayable: bool = True
    """True if the recorded copies are everything that the loaders do."""

    direct: bool = True
    """True if every parameter can be written in place or processed module by module. If not, vLLM's layerwise reload
    loads the model, which also recomputes derived parameters."""

    problem: tuple[str, str] | None = None
    """A parameter whose processing cannot be repeated, and the reason."""

    contiguous: dict[Target, tuple[int, int]] = field(default_factory=dict)
    """Parameters whose bytes are contiguous in one bucket: bucket index and first byte."""

    def copies_of(self, bucket: Bucket) -> list[Copy]:
        """The copies that load a bucket, in order."""
        return [copy for slot in bucket.slots for copy in self.copies[slot.name]]


class ScratchPool:
    """Buffers on the model's device in which parameters are assembled. Few are needed: layers arrive one by one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._used: dict[Target, Tensor] = {}

    def acquire(self, target: Target) -> Tensor:
        """A flat buffer with the target's dtype and number of elements; contents undefined."""
        nbytes = target.meta.numel() * target.meta.element_size()
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not buffer]
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._used[target] = buffer
        return buffer[:nbytes].view(target.meta.dtype)

    def release(self, target: Target) -> None:
        """Return the target's buffer to the pool."""
        self._free.append(self._used.pop(target))

    def users(self) -> list[Target]:
        """Targets that hold a buffer."""
        return list(self._used)

    def trim(self) -> None:
        """Free the buffers that no target holds."""
        self._free = []

    def __contains__(self, target: Target) -> bool:
        return target in self._used


class Arrivals:
    """Tensors that are still to arrive in a pass over the plan, and those that a copy completes."""

    def __init__(self, layout: Layout) -> None:
        self._left = {target: target.received for target in layout.targets}
        self._unprocessed: dict[nn.Module, list[Target]] = {}
        for target in layout.targets:
            if target.received and not target.in_place:
                self._unprocessed.setdefault(target.module, []).append(target)

    def completed_by(self, copy: Copy) -> list[Target]:
        """Counts the copy. The parameter that it completes, with all others of its module if that is processed."""
        self._left[copy.target] -= copy.numel
        module = copy.target.module
        targets = [copy.target] if copy.target.in_place else self._unprocessed.get(module, [])
        if any(self._left[target] for target in targets):
            return []
        return targets if copy.target.in_place else self._unprocessed.pop(module, [])

    def check_complete(self, problem: str) -> None:
        """Raises ReceiverError('count', name, ...) for the first parameter with missing elements."""
        for target, left in self._left.items():
            if left:
                raise ReceiverError("count", target.qualname, f"{left} of {target.received} elements {problem}")


class DryRun:
    """Builds a Layout, or raises ReceiverError('plan', name, ...) for a tensor or parameter that does not fit."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._by_storage: dict[int, Target] = {}
        self._metas: list[Tensor] = []
        self._buffers: set[int] = set()
        self._to_buffers: Counter[str] = Counter()
        self._current = ""
        self._tensor: Tensor | None = None
        self._layout = Layout()

    def run(self, plan: BucketPlan) -> Layout:
        """Check that every tensor of the plan fits, and that every parameter is complete."""
        swapped: list[tuple[dict[str, Any], str, Any]] = []
        try:
            self._swap(swapped)
            with torch.no_grad(), _WriteRecorder(self):
                self._model.load_weights(self._tensors(plan))
        except ReceiverError:
            raise
        except Exception as error:
            detail = str(error) or "name or shape does not fit the server's model"
            raise ReceiverError("plan", self._current, f"{type(error).__name__}: {detail}") from error
        finally:
            for table, name, value in reversed(swapped):
                table[name] = value
        layout = self._layout
        for bucket in plan.buckets:
            for slot in bucket.slots:
                self._check_tensor(slot)
        self._check_parameters()
        layout.direct = all(self._is_direct(target) for target in layout.targets)
        records = ((name, record_of(module)) for name, module in self._model.named_modules())
        layout.problem = next(((name, record.problem) for name, record in records if record and record.problem), None)
        if layout.replayable:
            layout.contiguous = _contiguous_parameters(plan, layout)
        return layout

    def on_copy(self, to: Tensor, source: Tensor) -> None:
        """Record one copy of a loader."""
        if to.numel() != source.numel():
            raise ValueError(f"shape {list(source.shape)} where the server has {list(to.shape)}")
        if source.dtype == torch.float8_e4m3fn != to.dtype:
            raise ValueError(f"float8_e4m3fn where the server has {to.dtype}: it must serve a blockwise fp8 checkpoint")
        target = self._by_storage.get(storage_id(to))
        from_received = self._tensor is not None and storage_id(source) == storage_id(self._tensor)
        if target is None or not from_received or to.shape != source.shape:
            self._layout.replayable = False
        if target is None:
            if storage_id(to) in self._buffers:
                self._to_buffers[self._current] += to.numel()
            return
        copies = self._layout.copies[self._current]
        if any(copy.target is target and copy.to_view == _geometry(to) for copy in copies):
            self._layout.replayable = False  # a loader that transforms what it has copied, such as Mamba's A_log
            return
        target.received += to.numel()
        copies.append(Copy(target, _geometry(to), _geometry(source)))

    def on_other_write(self, to: Tensor) -> None:
        """A loader writes a tensor other than by copying or by zeroing vocabulary padding."""
        if storage_id(to) in self._by_storage:
            self._layout.replayable = False

    def _swap(self, swapped: list[tuple[dict[str, Any], str, Any]]) -> None:
        copies: dict[int, Tensor] = {}
        for prefix, module in self._model.named_modules():
            restored = get_layerwise_info(module).restore_metadata
            for table, metas in ((module._parameters, restored[0]), (module._buffers, restored[1])):
                for name, live in list(table.items()):
                    if live is None or name in module._non_persistent_buffers_set:
                        continue
                    if id(live) not in copies:
                        copies[id(live)] = self._meta(module, prefix, name, live, metas.get(name))
                    swapped.append((table, name, live))
                    table[name] = copies[id(live)]

    def _meta(self, module: nn.Module, prefix: str, name: str, live: Tensor, stored: Tensor | None) -> Tensor:
        origin = live if stored is None else stored
        meta = like(origin, torch.empty(origin.numel(), dtype=origin.dtype, device="meta"))
        restore_layer_refs(meta, module)
        _unwrap_loader(meta)
        self._metas.append(meta)  # keeps the address of its storage from being reused
        if name in module._parameters:
            qualname, record = f"{prefix}.{name}" if prefix else name, record_of(module)
            if record is None:
                raise ReceiverError("plan", qualname, "this load format bypasses vLLM's own loader: use another")
            is_derived, is_processed = name in record.derived, name in record.changed
            target = Target(module, name, qualname, meta, live, is_derived, is_processed)
            self._layout.targets.append(target)
            self._by_storage[storage_id(meta)] = target
        else:
            self._buffers.add(storage_id(meta))
        return meta

    def _tensors(self, plan: BucketPlan) -> Iterator[tuple[str, Tensor]]:
        for bucket in plan.buckets:
            for slot in bucket.slots:
                self._current = slot.name
                self._layout.copies[slot.name] = []
                self._tensor = torch.empty(slot.shape, dtype=torch_dtype(slot.dtype), device="meta")
                yield slot.name, self._tensor

    def _check_tensor(self, slot: Slot) -> None:
        """Check the number of elements: a loader that slices its part out of a larger tensor accepts a wrong shape."""
        copies = self._layout.copies[slot.name]
        copied = sum(copy.numel for copy in copies) + self._to_buffers[slot.name]
        if not copied and slot.numel:
            if self._leaves_out(slot.name):
                return
            raise ReceiverError("plan", slot.name, "the server's model has no parameter for it")
        num_ranks = _num_tensor_ranks()
        if num_ranks > 1 and copies and all(isinstance(copy.target.module, VocabParallelEmbedding) for copy in copies):
            return  # the ranks' parts of a vocabulary differ in size, and its loader checks the full shape
        if copied > slot.numel or copied * num_ranks < slot.numel or (num_ranks == 1 and copied != slot.numel):
            detail = f"shape {list(slot.shape)}: the server loads {copied} of its {slot.numel} elements"
            raise ReceiverError("plan", slot.name, detail)

    def _leaves_out(self, name: str) -> bool:
        """True for a tensor of a layer that vLLM does not compute: it is None in every module that has it.

        An example is the last norm of a SigLIP tower whose features are those before it.
        """
        layer = name.rpartition(".")[0].rpartition(".")[2]
        layers = [getattr(module, layer) for module in self._model.modules() if layer and hasattr(module, layer)]
        return bool(layers) and all(each is None for each in layers)

    def _check_parameters(self) -> None:
        received = {copy.target for copies in self._layout.copies.values() for copy in copies}
        for target in self._layout.targets:
            needed = int(getattr(target.meta, "weight_loader_numel", target.meta.numel()))
            if target.is_derived:
                continue
            padded = isinstance(target.module, VocabParallelEmbedding)
            if needed and (target not in received if padded else target.received < needed):
                detail = f"the server's parameter receives {target.received} of its {needed} elements"
                raise ReceiverError("plan", target.qualname, detail)

    def _is_direct(self, target: Target) -> bool:
        if target.is_derived:
            return False  # no copy would update it
        record = known_record(target.module)
        as_loaded = target.is_processed and record.layouts[target.name] == layout_of(target.meta)
        return target.in_place or as_loaded or target.meta.numel() == 0


class _WriteRecorder(TorchDispatchMode):
    """Reports the loaders' writes to the dry run."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._run.on_copy(args[0], args[1])
        elif func._schema.is_mutable and func not in _ZEROING and args and isinstance(args[0], Tensor):
            self._run.on_other_write(args[0])
        return func(*args, **(kwargs or {}))


#: The loader zeroes vocabulary padding every time; DirectLoader does so itself. Its logits are discarded.
_ZEROING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


def _contiguous_parameters(plan: BucketPlan, layout: Layout) -> dict[Target, tuple[int, int]]:
    """Parameters whose bytes are contiguous in one bucket: single tensors, or neighbors that are fused.

    A module is processed when all its parameters are there, so all of them have to be in that bucket.
    """
    origins_of: dict[Target, set[tuple[int, int]]] = {}
    buckets: dict[nn.Module, set[int]] = {}
    for bucket in plan.buckets:
        for slot in bucket.slots:
            for copy in layout.copies[slot.name]:
                origins_of.setdefault(copy.target, set()).add(_origin(bucket, slot, copy))
                buckets.setdefault(copy.target.module, set()).add(bucket.index)
    complete = {
        target: next(iter(origins))
        for target, origins in origins_of.items()
        if len(origins) == 1 and target.received == target.meta.numel() and len(buckets[target.module]) == 1
    }
    return {target: origin for target, origin in complete.items() if origin[1] >= 0}


def _origin(bucket: Bucket, slot: Slot, copy: Copy) -> tuple[int, int]:
    """Bucket and byte at which the parameter would start if it is contiguous there; byte -1 if it cannot be."""
    (size, stride, to_offset), (_, from_stride, from_offset) = copy.to_view, copy.from_view
    dense = torch.empty(size, device="meta").stride()
    if stride != from_stride or stride != dense or slot.dtype != dtype_name(copy.target.meta.dtype):
        return bucket.index, -1
    start = slot.offset + (from_offset - to_offset) * copy.target.meta.element_size()
    return bucket.index, start if start % 64 == 0 else -1


def _unwrap_loader(meta: Any) -> None:
    """Unwrap loaders that a layerwise reload left in the stored metadata; outside a reload they load nothing."""
    loader = getattr(meta, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[union-attr]
        meta.weight_loader = loader


def _geometry(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _num_tensor_ranks() -> int:
    from vllm.distributed import get_tensor_model_parallel_world_size

    return int(get_tensor_model_parallel_world_size())
