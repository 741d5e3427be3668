"""Loading received tensors into vLLM's model.

Before any byte moves, ``ModelLoader.check`` runs the model's own ``load_weights`` once on meta tensors: every name,
every shape and the completeness of every parameter are known, and nothing is touched. The same run decides how to load:

direct     dense unquantised models. Tensors go through the model's weight loaders straight into the live parameters.
           vLLM's CPU build keeps linear weights packed and drops the plain ones: there a layer is assembled in a reused
           scratch buffer and packed again when its last tensor has come.
layerwise  everything else: vLLM's own layerwise reload, which holds on to tensors until a layer is complete, so what is
           pending when a bucket's memory is about to be reused is copied first.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from ..errors import ReceiverError
from ..plan import Bucket, BucketPlan
from ..sources import slot_view, torch_dtype

_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


@dataclass(eq=False)
class Target:
    """One parameter of one module of the model, as its loader wants to see it."""

    module: nn.Module
    name: str
    qualname: str
    meta: Tensor
    live: Tensor
    received: int = 0
    """Elements that the plan's tensors write into it, counted by the dry run."""

    @property
    def in_place(self) -> bool:
        """Whether the live parameter has the loader's layout; packed CPU layers keep an empty one."""
        return self.live.shape == self.meta.shape and self.live.numel() > 0


@dataclass
class Layout:
    """How one plan's tensors land in the model."""

    feeds: dict[str, list[tuple[Target, int]]] = field(default_factory=dict)
    """By tensor name: the parameters it goes to, and how many elements of each."""

    direct: bool = True


class ModelLoader:
    """Checks plans against one model and loads their buckets into it."""

    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self._model: Any = model
        self._model_config = model_config
        self._device = device
        self._layout = Layout()
        self._loaded: set[str] = set()
        self._left: dict[Target, int] = {}
        self._scratch = _ScratchPool(device)
        self._reloading = False

    def check(self, plan: BucketPlan) -> Layout:
        """Dry run on meta tensors. Raises ReceiverError('plan', name, ...) naming the tensor that does not fit."""
        return _DryRun(self._model, self._device).run(plan)

    def begin(self, layout: Layout) -> None:
        """Start receiving."""
        self._layout = layout
        self._loaded = set()
        self._left = {target: target.received for feeds in layout.feeds.values() for target, _ in feeds}
        if not layout.direct:
            initialize_layerwise_reload(self._model)
            self._reloading = True

    @torch.no_grad()
    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Load one bucket; its memory may be reused when this returns. Raises ReceiverError('load', name, ...)."""
        current = ""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            for slot in bucket.slots:
                current = slot.name
                yield slot.name, slot_view(bytes_N, slot)

        names = [slot.name for slot in bucket.slots]
        if self._layout.direct:
            self._use_scratch(names)
        try:
            self._model.load_weights(tensors())
        except Exception as error:
            raise ReceiverError("load", current, f"{type(error).__name__}: {error}") from error
        self._loaded.update(names)
        if self._layout.direct:
            self._process_complete(names)
        else:
            self._keep_pending(bytes_N)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @torch.no_grad()
    def finish(self) -> int:
        """Process what remains and return the number of tensors loaded. Raises ReceiverError('count', name, ...)."""
        for target, left in self._left.items():
            if left and self._layout.direct:
                raise ReceiverError("count", target.qualname, f"{left} of {target.received} elements did not arrive")
        if not self._layout.direct:
            finalize_layerwise_reload(self._model, self._model_config)
            self._reloading = False
        self._pack_heads()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return len(self._loaded)

    def abort(self) -> None:
        """Put the model's structure back after a failed update; its values may be mixed until a full resend."""
        for target in list(self._scratch.users()):
            target.module._parameters[target.name] = target.live  # type: ignore[assignment]
            self._scratch.release(target)
        if self._reloading:
            self._reloading = False
            for module in self._model.modules():
                info = get_layerwise_info(module)
                if info.can_load():
                    _place_back(module, info)

    def _use_scratch(self, names: list[str]) -> None:
        for name in names:
            for target, _ in self._layout.feeds[name]:
                if not target.in_place and target not in self._scratch:
                    scratch = _like(target.meta, self._scratch.acquire(target))
                    target.module._parameters[target.name] = scratch  # type: ignore[assignment]

    def _process_complete(self, names: list[str]) -> None:
        """Pack every scratch-assembled layer whose last tensor was in this bucket."""
        for name in names:
            for target, numel in self._layout.feeds[name]:
                self._left[target] -= numel
                if self._left[target] == 0 and target in self._scratch:
                    target.module.quant_method.process_weights_after_loading(target.module)  # type: ignore[union-attr,operator]
                    target.module._parameters[target.name] = target.live  # type: ignore[assignment]
                    self._scratch.release(target)

    def _keep_pending(self, bytes_N: Tensor) -> None:
        """Copy what layerwise reload still holds of this bucket."""
        storage = bytes_N.untyped_storage().data_ptr()
        for module in self._model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if _lies_in(value, storage):
                        bound.arguments[key] = value.clone()

    def _pack_heads(self) -> None:
        """On the CPU, embeddings and heads keep their plain weight and a packed copy: renew it.

        vLLM's own finalisation misses a head tied to the embedding and would leave the old policy's there. An embedding
        that is no head never multiplies with its packed copy; it is dropped for the plain one.
        """
        if self._device.type != "cpu":
            return
        embeddings = [m for m in self._model.modules() if isinstance(m, VocabParallelEmbedding)]
        has_head = any(isinstance(m, ParallelLMHead) for m in embeddings)
        for module in embeddings:
            if not hasattr(module, "cpu_linear"):
                continue
            if isinstance(module, ParallelLMHead) or not has_head:
                module.quant_method.process_weights_after_loading(module)
            else:
                module.cpu_linear = nn.functional.linear


class _DryRun:
    """Runs the model's ``load_weights`` on meta tensors, with every parameter replaced by a meta copy."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        self._targets: dict[int, Target] = {}
        self._current = ""
        self._layout = Layout()
        self._counter = _CopyCounter()

    def run(self, plan: BucketPlan) -> Layout:
        """Check every tensor of the plan, then the completeness of every parameter."""
        swapped: list[tuple[dict[str, Any], str, Any]] = []
        try:
            self._swap(swapped)
            with torch.no_grad(), self._counter:
                self._model.load_weights(self._tensors(plan))
        except ReceiverError:
            raise
        except Exception as error:
            detail = str(error) or "shape or name does not fit the server's model"
            raise ReceiverError("plan", self._current, f"{type(error).__name__}: {detail}") from error
        finally:
            for table, name, value in reversed(swapped):
                table[name] = value
        self._check_tensors(plan)
        self._check_parameters()
        self._layout.direct = self._layout.direct and all(self._is_direct(t) for t in self._targets.values())
        return self._layout

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
                    table[name] = copies[id(live)]  # type: ignore[assignment]

    def _meta(self, module: nn.Module, prefix: str, name: str, live: Tensor, stored: Tensor | None) -> Tensor:
        origin = live if stored is None else stored
        meta = _like(origin, torch.empty(origin.numel(), dtype=origin.dtype, device="meta"))
        restore_layer_refs(meta, module)
        if name in module._parameters:
            qualname = f"{prefix}.{name}" if prefix else name
            target = Target(module, name, qualname, _like(meta, meta.data), live)
            self._targets[id(live)] = target
            meta.weight_loader = self._recorder(target, getattr(meta, "weight_loader", default_weight_loader))  # type: ignore[attr-defined]
        return meta

    def _recorder(self, target: Target, loader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loader)
        def record(*args: Any, **kwargs: Any) -> Any:
            before = self._counter.numel
            result = loader(*args, **kwargs)
            copied = self._counter.numel - before
            self._layout.feeds[self._current].append((target, copied))
            target.received += copied
            return result

        return record

    def _tensors(self, plan: BucketPlan) -> Iterator[tuple[str, Tensor]]:
        for bucket in plan.buckets:
            for slot in bucket.slots:
                self._current = slot.name
                self._layout.feeds[slot.name] = []
                yield slot.name, torch.empty(slot.shape, dtype=torch_dtype(slot.dtype), device="meta")

    def _check_tensors(self, plan: BucketPlan) -> None:
        """A loader that cuts its part out of a larger tensor would take a wrong shape without a word."""
        for bucket in plan.buckets:
            for slot in bucket.slots:
                numel = 1
                for size in slot.shape:
                    numel *= size
                copied = sum(count for _, count in self._layout.feeds[slot.name])
                if copied == 0:
                    raise ReceiverError("plan", slot.name, "no parameter of the server's model takes it")
                num_ranks = _num_tensor_ranks()
                if copied > numel or copied * num_ranks < numel or (num_ranks == 1 and copied != numel):
                    detail = f"shape {list(slot.shape)}: the server takes {copied} of its {numel} elements"
                    raise ReceiverError("plan", slot.name, detail)

    def _check_parameters(self) -> None:
        for target in self._targets.values():
            needed = int(getattr(target.meta, "weight_loader_numel", target.meta.numel()))
            enough = (
                target.received > 0
                if isinstance(target.module, VocabParallelEmbedding)
                else (target.received >= needed)
            )
            if needed and not enough:
                detail = f"the server's parameter gets {target.received} of its {needed} elements from this manifest"
                raise ReceiverError("plan", target.qualname, detail)

    def _is_direct(self, target: Target) -> bool:
        method = getattr(target.module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            return False
        packed = self._device.type == "cpu" and target.live.numel() == 0 and method is not None
        return target.in_place or packed


class _ScratchPool:
    """Reused buffers in which packed layers are assembled; few are needed, for layers arrive one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._used: dict[Target, Tensor] = {}

    def acquire(self, target: Target) -> Tensor:
        """A buffer with the target's dtype and number of elements."""
        nbytes = target.meta.numel() * target.meta.element_size()
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        if fitting:
            buffer = min(fitting, key=lambda b: b.numel())
            self._free = [b for b in self._free if b is not buffer]
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._used[target] = buffer
        return buffer[:nbytes].view(target.meta.dtype)

    def release(self, target: Target) -> None:
        """Give the target's buffer back."""
        self._free.append(self._used.pop(target))

    def users(self) -> list[Target]:
        """Targets that hold a buffer."""
        return list(self._used)

    def __contains__(self, target: Target) -> bool:
        return target in self._used


class _CopyCounter(TorchDispatchMode):
    """Counts the elements that loaders copy."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            if args[0].shape != args[1].shape and args[0].numel() != args[1].numel():
                raise ValueError(f"shape {list(args[1].shape)} where the server has {list(args[0].shape)}")
            self.numel += args[0].numel()
        return func(*args, **(kwargs or {}))


def _like(origin: Tensor, flat_N: Tensor) -> Tensor:
    """``flat_N`` with the shape, class and attributes (loaders among them) of ``origin``."""
    tensor = flat_N.view(origin.shape)
    tensor.__class__ = origin.__class__
    tensor.__dict__ = origin.__dict__.copy()
    return tensor


def _lies_in(value: Any, storage_ptr: int) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == storage_ptr


def _place_back(module: nn.Module, info: Any) -> None:
    """Undo layerwise reload's replacement of one module's tensors."""
    parameters, buffers = info.kernel_tensors
    for name in [*module._parameters, *module._buffers]:
        delattr(module, name)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    persistent_unknown: set[str] = set()
    non_persistent = getattr(info, "kernel_non_persistent_buffers", persistent_unknown)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=name not in non_persistent)
    info.reset()


def _num_tensor_ranks() -> int:
    from vllm.distributed import get_tensor_model_parallel_world_size

    return int(get_tensor_model_parallel_world_size())
