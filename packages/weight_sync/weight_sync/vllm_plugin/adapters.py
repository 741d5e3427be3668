"""LoRA adapters in memory: the worker keeps the received tensors, and vLLM's adapter manager loads them from there.

vLLM loads an adapter when a request needs it and no slot holds it, and it clears its slots whenever weights are
replaced. The worker therefore keeps the tensors, and a patch makes vLLM look them up before it reads the adapter's
folder. ``publish`` makes a version visible; until then the previous version stays.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..config import Adapter
from ..errors import ReceiverError, SyncConfigError
from ..plan import Bucket, BucketPlan, Slot
from ..tensors import num_wrong_bytes, slot_view
from .patch import FENCE

PATCH = FENCE.patch(
    name="LoRA adapters in memory",
    reason="vLLM loads a pushed adapter from the worker's memory instead of a folder",
    otherwise="refused",
    replaces={"vllm.lora.worker_manager:WorkerLoRAManager": ("_load_adapter(lora_request, ...)",)},
    reads={
        "vllm.lora.worker_manager:WorkerLoRAManager": ("_adapter_manager",),
        "vllm.lora.model_manager:LoRAModelManager": ("modules", "packed_modules", "lora_config", "remove_all_adapters"),
        "vllm.lora.lora_model:LoRAModel": ("from_lora_tensors",),
        "vllm.lora.peft_helper:PEFTHelper": ("from_dict", "validate_legal"),
        "vllm.lora.utils": ("parse_fine_tuned_lora_name",),
    },
)

#: Attribute of vLLM's adapter manager: for each pushed adapter, by path, `_lora_model` of its current version.
_STORE = "pushed_by_weight_sync"


class AdapterLoader:
    """Checks plans against the server's LoRA slots and keeps the received tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._manager: Any = getattr(model, "lora_manager", None)
        self._adapter: Adapter | None = None
        self._staged: dict[str, Tensor] = {}
        if self._manager is not None:
            setattr(self._manager, _STORE, {})
            patch_adapter_loading()

    def check(self, plan: BucketPlan, adapter: Mapping[str, Any]) -> None:
        """Raises ReceiverError('plan', name, ...) for a tensor or setting that does not fit the server's LoRA slots."""
        if self._manager is None:
            raise ReceiverError("plan", "", "the server accepts no adapters: start it with --enable-lora")
        try:
            self._adapter = Adapter(name=adapter["name"], settings=adapter["settings"])
            _peft_helper(self._adapter).validate_legal(self._manager.lora_config)
        except (SyncConfigError, TypeError, ValueError) as error:
            raise ReceiverError("plan", "", f"adapter settings: {error}") from error
        halves: dict[tuple[str, bool], Slot] = {}
        for bucket in plan.buckets:
            for slot in bucket.slots:
                halves[self._find_module(slot)] = slot
        for (module, is_a), slot in halves.items():
            other = halves.get((module, not is_a))
            if other is None:
                raise ReceiverError("plan", slot.name, f"its lora_{'B' if is_a else 'A'} is missing")
            if is_a:
                self._check_shapes(module, slot, other)

    def begin(self) -> None:
        """Start a new version."""
        self._staged = {}

    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Copy one bucket's tensors; its memory may be reused when this returns."""
        for slot in bucket.slots:
            self._staged[slot.name] = slot_view(bytes_N, slot).to("cpu", copy=True)

    def finish(self) -> int:
        """The number of tensors received."""
        return len(self._staged)

    def verifier(self) -> "AdapterLoader":
        """Compares the received tensors with a second transfer."""
        return self

    def verify(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Compare one bucket. Raises ReceiverError('verify', name, ...) at the first difference."""
        for slot in bucket.slots:
            if wrong := num_wrong_bytes(self._staged[slot.name], slot_view(bytes_N, slot).to("cpu")):
                raise ReceiverError("verify", slot.name, f"{wrong} bytes differ from the trainer's")

    def abort(self) -> None:
        """Drop the received tensors; the previous version stays."""
        self._adapter, self._staged = None, {}

    def publish(self) -> None:
        """Make the received version the current one. vLLM clears its slots and loads it on the next request."""
        if self._adapter is not None and self._staged:
            getattr(self._manager, _STORE)[self._adapter.path] = partial(_lora_model, self._adapter, self._staged)
            self._manager.remove_all_adapters()
        self.abort()

    def _find_module(self, slot: Slot) -> tuple[str, bool]:
        """The tensor's module, and whether it is a lora_A."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            module, is_a = parse_fine_tuned_lora_name(slot.name, _weights_mapper(self._manager.model))
        except ValueError as error:
            raise ReceiverError("plan", slot.name, "the name is not that of a LoRA tensor") from error
        if module not in self._modules():
            raise ReceiverError("plan", slot.name, f"the server has no LoRA slot for {module!r}")
        return module, is_a

    def _modules(self) -> dict[str, tuple[Any, int | None]]:
        """Modules with a LoRA slot: the server's layer and, in a fused layer, the index of the part."""
        fused = self._manager.packed_modules
        modules: dict[str, tuple[Any, int | None]] = {}
        for name, layer in self._manager.modules.items():
            if name in fused:
                modules |= {part: (layer, index) for index, part in enumerate(fused[name])}
            else:
                modules[name] = (layer, None)
        return modules

    def _check_shapes(self, module: str, a: Slot, b: Slot) -> None:
        """Compare every size: vLLM silently copies a smaller tensor into a part of its slot."""
        layer, index = self._modules()[module]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ReceiverError("plan", a.name, f"shapes {list(a.shape)} and {list(b.shape)} are not a low-rank pair")
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


def patch_adapter_loading() -> None:
    """Make vLLM's worker load pushed adapters from memory. Can be called twice."""
    PATCH.check()
    PATCH.wrap(_loading_from_memory)
    load_weights_below_adapters()


def load_weights_below_adapters() -> None:
    """Makes layers with LoRA slots pass weights on to the layers that they wrap, as vLLM does itself from 0.29 on.

    Earlier ones refuse the base model's weights once adapters are enabled. Can be called twice.
    """
    from vllm.lora.layers.base import BaseLayerWithLoRA

    if not hasattr(BaseLayerWithLoRA, "load_weights"):
        BaseLayerWithLoRA.load_weights = _load_base_weights


def _load_base_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    load = getattr(self.base_layer, "load_weights", None)
    names = load(weights) if callable(load) else AutoWeightsLoader(self.base_layer).load_weights(weights)
    return [f"base_layer.{name}" for name in names or ()]


def _loading_from_memory(read_folder: Any) -> Any:
    """``_load_adapter`` that reads an adapter's folder only if the adapter was not pushed."""

    def load_adapter(self: Any, lora_request: Any) -> Any:
        model_of = getattr(self._adapter_manager, _STORE, {}).get(lora_request.lora_path)
        if model_of is None:
            return read_folder(self, lora_request)
        return model_of(lora_request.lora_int_id, self._adapter_manager)

    return load_adapter


def _lora_model(adapter: Adapter, tensors: Mapping[str, Tensor], lora_id: int, manager: Any) -> Any:
    """The adapter as vLLM's LoRAModel. Copies the tensors, because vLLM multiplies the scale into them."""
    from vllm.lora.lora_model import LoRAModel

    return LoRAModel.from_lora_tensors(
        lora_id,
        {name: tensor.clone() for name, tensor in tensors.items()},
        _peft_helper(adapter),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_weights_mapper(manager.model),
    )


def _peft_helper(adapter: Adapter) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    return PEFTHelper.from_dict(dict(adapter.settings))


def _weights_mapper(model: Any) -> Any:
    """The model's renames from Hugging Face to vLLM, without the rules that stack parts of fused layers."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for without_stacking in ("get_rename_mapper", "get_unstacked_mapper"):  # vLLM 0.29 and later; earlier
        if hasattr(mapper, without_stacking):
            return getattr(mapper, without_stacking)()
    return mapper
