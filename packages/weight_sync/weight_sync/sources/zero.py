"""Source for a module trained by DeepSpeed ZeRO, stage 1, 2 or 3.

Stages 1 and 2 keep full parameters on every rank, so the sending rank copies them. Stage 3 keeps a flat shard of each
parameter, padded at the tail so that all shards have one length. The shards of a bucket are gathered in one step:

* over NCCL, each all-gather writes straight into its slot of the bucket (a slot reserves room for the padding), and the
  calls are coalesced;
* over gloo, the bucket's shards are one message per rank to the sending rank;
* shards that are not plain device tensors (offloaded, quantized, hpZ) go through DeepSpeed's own gather.

Low-rank updates (LoRA) are merged into a slot after it is filled, so full weights are sent. A parameter that holds its
weight in another form (4 bits, or with others: fused experts) is gathered as it is and unpacked into its slot.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import SourceError
from ..manifest import TensorEntry, WeightManifest
from ..plan import Bucket, Slot
from ..tensors import dtype_name, slot_view, torch_dtype
from .base import named_tensors, staged, wire_dtype

_dist: Any = dist
# torch 2.13 warns at every use of all_gather_into_tensor.
_all_gather_single = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor


class LowRankUpdate(Protocol):
    """An update of a frozen parameter that is kept apart from it, such as LoRA's scale * B @ A."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """The parameters that `merged` reads; the source gathers them."""

    def merged(self, weight: Tensor) -> Tensor:
        """The full weight plus the update, same shape, in any floating-point dtype."""


class TensorPacking(Protocol):
    """Converts a parameter that holds a weight in another form, such as 4 bits, into that weight."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the weight."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weight."""

    def unpack(self, packed: Tensor) -> Tensor:
        """The weight, with this shape and dtype, from the full parameter."""


class NamedParameter(Protocol):
    """A parameter and the Hugging Face name under which it is sent."""

    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> Tensor:
        """The parameter, or a persistent buffer."""

    @property
    def low_rank(self) -> LowRankUpdate | None:
        """The update to merge; None: the weight is sent unchanged."""

    @property
    def packed(self) -> TensorPacking | None:
        """Recipe that unpacks the parameter; None: the parameter is the weight."""


class ZeroSource:
    """Parameters and persistent buffers of a module trained by DeepSpeed, sharded (stage 3) or not (1 and 2).

    ``weights`` is the module, or an iterable of named parameters when names differ or low-rank updates are merged.
    ``dtype`` casts floating-point parameters before sending. ``root`` is the sending rank within the ZeRO group. Every
    rank of the ZeRO group must call ``fill`` for every bucket in order. Raises SourceError for a module without
    parameters.
    """

    def __init__(
        self, weights: nn.Module | Iterable[NamedParameter], dtype: torch.dtype | None = None, *, root: int = 0
    ) -> None:
        self._dtype = dtype
        self._root = root
        self._updates: dict[str, LowRankUpdate] = {}
        self._packings: dict[str, TensorPacking] = {}
        if isinstance(weights, nn.Module):
            self._params: dict[str, Any] = dict(named_tensors(weights))
        else:
            named = list(weights)
            self._params = {tensor.name: tensor.parameter for tensor in named}
            self._updates = {tensor.name: tensor.low_rank for tensor in named if tensor.low_rank is not None}
            self._packings = {tensor.name: tensor.packed for tensor in named if tensor.packed is not None}
        if not self._params:
            raise SourceError("the module has no parameters")
        self._scratch: Tensor | None = None

    def manifest(self) -> WeightManifest:
        """Names, full shapes, wire dtypes, and the tail padding of ZeRO-3 shards."""
        return WeightManifest.of(self._entry(name, param) for name, param in self._params.items())

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        with torch.no_grad():
            full, sharded, special = self._group_slots(bucket)
            if sharded:
                self._gather_shards(bucket, sharded, out)
            if special:
                self._gather_with_deepspeed(special, out)
            if full and out is not None:
                self._copy_full(bucket, full, out)
            self._merge([slot for slot in bucket.slots if slot.name in self._updates], out)

    def _entry(self, name: str, param: Any) -> TensorEntry:
        packing = self._packings.get(name)
        if packing is not None:
            dtype = self._dtype or packing.dtype
            return TensorEntry(name=name, shape=tuple(packing.shape), dtype=dtype_name(dtype))
        shape = tuple(getattr(param, "ds_shape", param.shape))
        dtype = wire_dtype(param, self._dtype)
        padding = 0
        if hasattr(param, "ds_tensor"):  # also for hpZ, which needs no padding: its secondary shards come and go
            padding = param.ds_tensor.ds_numel * dist.get_world_size(param.ds_process_group) - param.ds_numel
        return TensorEntry(name=name, shape=shape, dtype=dtype_name(dtype), padding=padding)

    def _group_slots(self, bucket: Bucket) -> tuple[list[Slot], list[Slot], list[Slot]]:
        """Slots of full parameters, of plain shards, and of packed ones and shards that only DeepSpeed can gather."""
        groups: tuple[list[Slot], list[Slot], list[Slot]] = ([], [], [])
        for slot in bucket.slots:
            param = self._params[slot.name]
            is_special = slot.name in self._packings or (hasattr(param, "ds_tensor") and not _is_plain_shard(param))
            groups[2 if is_special else 1 if hasattr(param, "ds_tensor") else 0].append(slot)
        return groups

    def _copy_full(self, bucket: Bucket, slots: list[Slot], out: Tensor) -> None:
        """Copy full parameters (stages 1 and 2). With staging, a bucket with other slots too would lose those slots."""
        if len(slots) == len(bucket.slots):
            with staged(bucket, out, self._params[slots[0].name].device) as bytes_N:
                targets = [slot_view(bytes_N, slot) for slot in slots]
                torch._foreach_copy_(targets, [self._params[slot.name].detach() for slot in slots])
        else:
            for slot in slots:
                slot_view(out, slot).copy_(self._params[slot.name])

    def _gather_shards(self, bucket: Bucket, slots: list[Slot], out: Tensor | None) -> None:
        group = self._params[slots[0].name].ds_process_group
        device = self._params[slots[0].name].ds_tensor.device
        if device.type != "cpu":
            self._all_gather_into_slots(bucket, slots, out, group, device)
        else:
            self._gather_to_root(slots, out, group)

    def _all_gather_into_slots(
        self, bucket: Bucket, slots: list[Slot], out: Tensor | None, group: Any, device: torch.device
    ) -> None:
        """Coalesced all-gathers, each writing into the slot of its tensor."""
        direct = out is not None and out.device == device
        target = out if direct else self._scratch_bytes(bucket.nbytes, device)
        assert target is not None
        casts: list[tuple[Slot, Tensor]] = []
        with dist._coalescing_manager(group=group, device=device, async_ops=False):  # type: ignore[attr-defined]
            for slot in slots:
                shard = self._params[slot.name].ds_tensor
                numel = shard.ds_numel * dist.get_world_size(group)
                if shard.dtype == torch_dtype(slot.dtype):
                    width = numel * shard.element_size()
                    gathered = target[slot.offset : slot.offset + width].view(shard.dtype)
                else:
                    gathered = torch.empty(numel, dtype=shard.dtype, device=device)
                    casts.append((slot, gathered))
                _all_gather_single(gathered, shard.view(-1)[: shard.ds_numel], group=group)
        for slot, gathered in casts:
            slot_view(target, slot).view(-1).copy_(gathered[: slot.numel])
        if out is not None and not direct:
            if len(slots) == len(bucket.slots):
                out[: bucket.nbytes].copy_(target[: bucket.nbytes])
            else:
                for slot in slots:
                    slot_view(out, slot).copy_(slot_view(target, slot))

    def _gather_to_root(self, slots: list[Slot], out: Tensor | None, group: Any) -> None:
        """CPU: one message per rank with the bucket's shards; the root copies them into the slots."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        shards = [self._params[slot.name].ds_tensor for slot in slots]
        mine = torch.cat(
            [shard.detach().reshape(-1)[: shard.ds_numel].contiguous().view(torch.uint8) for shard in shards]
        )
        parts = [torch.empty_like(mine) for _ in range(world)] if rank == self._root else None
        dist.gather(mine, parts, dst=dist.get_global_rank(group, self._root), group=group)
        if out is None:
            return
        if parts is None:
            raise SourceError(f"rank {rank} of the ZeRO group cannot send: the root is rank {self._root}")
        offset = 0
        for slot, shard in zip(slots, shards, strict=True):
            width = shard.ds_numel * shard.element_size()
            flat = slot_view(out, slot).view(-1)
            for index, part in enumerate(parts):
                piece = part[offset : offset + width].view(shard.dtype)
                start = index * shard.ds_numel
                length = max(0, min(shard.ds_numel, flat.numel() - start))
                flat[start : start + length].copy_(piece[:length])
            offset += width

    def _gather_with_deepspeed(self, slots: list[Slot], out: Tensor | None) -> None:
        """Gather offloaded, quantized and hpZ shards and packed parameters; the sending rank copies or unpacks them
        before DeepSpeed shards them again."""
        params = [self._params[slot.name] for slot in slots]
        with _gathered(params):
            if out is not None:
                for slot, param in zip(slots, params, strict=True):
                    packing = self._packings.get(slot.name)
                    whole = param.data.view(slot.shape) if packing is None else packing.unpack(param.data)
                    slot_view(out, slot).copy_(whole)

    def _merge(self, slots: list[Slot], out: Tensor | None) -> None:
        """Gather a bucket's low-rank updates, which are small, in one step, and merge them on their own device."""
        parts = list(dict.fromkeys(part for slot in slots for part in self._updates[slot.name].parts))
        with _gathered(parts):
            if out is not None:
                for slot in slots:
                    update = self._updates[slot.name]
                    weight = slot_view(out, slot)
                    weight.copy_(update.merged(weight.to(update.parts[0].device)))

    def _scratch_bytes(self, nbytes: int, device: torch.device) -> Tensor:
        if self._scratch is None or self._scratch.numel() < nbytes or self._scratch.device != device:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._scratch


def _gathered(params: list[Any]) -> AbstractContextManager[Any]:
    """Context in which `params` are full: DeepSpeed gathers those that ZeRO-3 has sharded."""
    if not any(hasattr(param, "ds_tensor") for param in params):
        return nullcontext()
    from deepspeed import zero

    return cast("AbstractContextManager[Any]", zero.GatheredParameters(params))


def _is_plain_shard(param: Any) -> bool:
    """True if the parameter is a plain ZeRO-3 shard on a device that its process group's backend supports."""
    shard = getattr(param, "ds_tensor", None)
    if shard is None or getattr(shard, "ds_numel", 0) == 0 or shard.numel() < shard.ds_numel:
        return False
    if getattr(param, "ds_secondary_tensor", None) is not None or hasattr(shard, "ds_quant_scale"):
        return False
    if shard.dtype != param.dtype:
        return False
    on_cpu = shard.device.type == "cpu"
    return bool(on_cpu == ("gloo" in str(dist.get_backend(param.ds_process_group))))
