"""LoRA adapters in memory: received tensors are kept by the worker, and vLLM's adapter manager loads them from there.

vLLM loads an adapter when a request asks for it and its slot does not hold it, and empties its slots whenever weights
were replaced. So the tensors stay here, and the one method that reads an adapter's folder is taught to look here first.
A version counts from ``publish`` on; until then the one before stays in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter import Adapter
from ..errors import ReceiverError, SyncConfigError
from ..plan import Bucket, BucketPlan, Slot
from ..sources.base import slot_view

_STORE = "pushed_by_weight_sync"


@dataclass(frozen=True)
class Held:
    """One adapter version as it came."""

    adapter: Adapter
    tensors: Mapping[str, Tensor]

    def model(self, lora_id: int, manager: Any) -> Any:
        """vLLM's form of it. The tensors are copied, for vLLM multiplies the scale into them."""
        from vllm.lora.lora_model import LoRAModel

        return LoRAModel.from_lora_tensors(
            lora_id,
            {name: tensor.clone() for name, tensor in self.tensors.items()},
            _helper(self.adapter),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=_mapper(manager.model),
        )


class AdapterLoader:
    """Checks plans against the server's LoRA slots and keeps their tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._manager: Any = getattr(model, "lora_manager", None)
        self._adapter: Adapter | None = None
        self._staged: dict[str, Tensor] = {}
        self._num_compared = 0
        if self._manager is not None:
            setattr(self._manager, _STORE, {})
            look_here_first()

    def check(self, plan: BucketPlan, adapter: Mapping[str, Any]) -> None:
        """Raises ReceiverError('plan', name, ...) naming what the server's LoRA slots cannot take."""
        if self._manager is None:
            raise ReceiverError("plan", "", "the server takes no adapters: start it with --enable-lora")
        try:
            self._adapter = Adapter(name=adapter["name"], settings=adapter["settings"])
            _helper(self._adapter).validate_legal(self._manager.lora_config)
        except (SyncConfigError, TypeError, ValueError) as error:
            raise ReceiverError("plan", "", f"adapter settings: {error}") from error
        halves: dict[tuple[str, bool], Slot] = {}
        for bucket in plan.buckets:
            for slot in bucket.slots:
                halves[self._place(slot)] = slot
        for (module, is_a), slot in halves.items():
            other = halves.get((module, not is_a))
            if other is None:
                raise ReceiverError("plan", slot.name, f"comes without its {'B' if is_a else 'A'}")
            if is_a:
                self._check_shapes(module, slot, other)

    def begin(self) -> None:
        """A new version."""
        self._staged = {}

    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Copy one bucket's tensors; its memory may be reused when this returns."""
        for slot in bucket.slots:
            self._staged[slot.name] = slot_view(bytes_N, slot).to("cpu", copy=True)

    def finish(self) -> int:
        """The number of tensors taken."""
        return len(self._staged)

    def begin_verify(self) -> None:
        """Start comparing what was taken with a second sending."""
        self._num_compared = 0

    def verify(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Compare one bucket. Raises ReceiverError('verify', name, ...) at the first difference."""
        for slot in bucket.slots:
            held, sent = self._staged[slot.name], slot_view(bytes_N, slot).to("cpu")
            wrong = int((held.view(torch.uint8) != sent.view(torch.uint8)).sum())
            if wrong:
                raise ReceiverError("verify", slot.name, f"{wrong} bytes differ from the trainer's")
        self._num_compared += len(bucket.slots)

    def finish_verify(self) -> int:
        """The number of tensors compared."""
        return self._num_compared

    def abort(self) -> None:
        """Forget what came; the version before stays."""
        self._adapter, self._staged = None, {}

    def publish(self) -> None:
        """From now on the adapter is what came last. vLLM's slots are emptied and filled again on demand."""
        if self._adapter is not None and self._staged:
            getattr(self._manager, _STORE)[self._adapter.path] = Held(self._adapter, self._staged)
            self._manager.remove_all_adapters()
        self.abort()

    def _place(self, slot: Slot) -> tuple[str, bool]:
        """The module a tensor belongs to, and whether it is an A."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            module, is_a = parse_fine_tuned_lora_name(slot.name, _mapper(self._manager.model))
        except ValueError as error:
            raise ReceiverError("plan", slot.name, "is not an adapter's tensor by its name") from error
        if module not in self._places():
            raise ReceiverError("plan", slot.name, f"the server has no LoRA slot for {module!r}")
        return module, is_a

    def _places(self) -> dict[str, tuple[Any, int | None]]:
        """Module names an adapter may use: the server's layer behind each and, in a fused one, the part's index."""
        fused = self._manager.packed_modules
        places: dict[str, tuple[Any, int | None]] = {}
        for name, layer in self._manager.modules.items():
            places |= {part: (layer, index) for index, part in enumerate(fused[name])} if name in fused else {}
            places |= {name: (layer, None)} if name not in fused else {}
        return places

    def _check_shapes(self, module: str, a: Slot, b: Slot) -> None:
        """vLLM copies a smaller tensor into a corner of its slot without a word, so every size is compared here."""
        layer, index = self._places()[module]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ReceiverError("plan", a.name, f"shapes {list(a.shape)} and {list(b.shape)} are no low-rank pair")
        if a.shape[0] > self._manager.lora_config.max_lora_rank:
            raise ReceiverError("plan", a.name, f"rank {a.shape[0]} is above the server's --max-lora-rank")
        if not isinstance(getattr(layer, "lora_a_stacked", None), tuple):
            return
        parts = layer.lora_b_stacked if index is None else layer.lora_b_stacked[index : index + 1]
        num_ranks = int(getattr(layer, "tp_size", 1))
        for slot, size, own in (
            (a, a.shape[1], int(layer.lora_a_stacked[0].shape[-1])),
            (b, b.shape[0], sum(int(part.shape[-2]) for part in parts)),
        ):
            if size != own and not (num_ranks > 1 and size <= own * num_ranks and size % own == 0):
                raise ReceiverError("plan", slot.name, f"shape {list(slot.shape)}: the server's layer has {own}")


def look_here_first() -> None:
    """Teach vLLM's worker to load a pushed adapter from memory. Safe to call twice."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    read_folder = WorkerLoRAManager._load_adapter
    if getattr(read_folder, _STORE, False):
        return

    def load_adapter(self: Any, lora_request: Any) -> Any:
        held = getattr(self._adapter_manager, _STORE, {}).get(lora_request.lora_path)
        if held is None:
            return read_folder(self, lora_request)
        return held.model(lora_request.lora_int_id, self._adapter_manager)

    setattr(load_adapter, _STORE, True)
    WorkerLoRAManager._load_adapter = load_adapter


def _helper(adapter: Adapter) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    return PEFTHelper.from_dict(dict(adapter.settings))


def _mapper(model: Any) -> Any:
    """Renames between Hugging Face and vLLM that the model declares, without its stacking rules where it has such."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for without_stacking in ("get_rename_mapper", "get_unstacked_mapper"):  # since vLLM 0.29; before
        if hasattr(mapper, without_stacking):
            return getattr(mapper, without_stacking)()
    return mapper
