"""Loads received tensors into vLLM's model, in one of two ways.

direct     Replays the copies recorded by the dry run on the live parameters. A module whose weights vLLM processed
           after loading (on the CPU all linear layers and experts) is processed again when its parameters are complete,
           straight from the bucket if their bytes are contiguous in it, else from a scratch buffer.
layerwise  Models with parameters that vLLM derives from other modules: vLLM's own layerwise reload. It keeps references
           to tensors until a layer is complete, so tensors that are still pending are cloned before a bucket's memory
           is reused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from ..errors import ReceiverError
from ..plan import Bucket, BucketPlan
from ..tensors import like, slot_view, storage_id, synchronize
from .layout import Arrivals, DryRun, Layout, ScratchPool, Target
from .patch import FENCE
from .processing import first_processing, known_record, processed, record_of, take_over
from .verify import Verifier

_RELOAD = "vllm.model_executor.model_loader.reload"

PATCH = FENCE.patch(
    name="layerwise reload",
    reason="loads models with derived parameters, and restores the model after a failed push",
    otherwise="refused",
    reads={
        f"{_RELOAD}.layerwise": ("finalize_layerwise_reload", "initialize_layerwise_reload(model, ...)"),
        f"{_RELOAD}.types:LayerReloadingInfo": ("kernel_tensors", "loaded_weights", "can_load", "reset"),
        "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm(layer, remove_weight, ...)",),
    },
)


class ModelLoader:
    """Checks plans against one model and loads their buckets into it."""

    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self._model: Any = model
        self._model_config = model_config
        self._device = device
        self._scratch = ScratchPool(device)
        self._layout = Layout()
        self._active: DirectLoader | LayerwiseLoader = DirectLoader(model, self._scratch, self._layout)
        self._loaded: set[str] = set()

    def check(self, plan: BucketPlan) -> Layout:
        """Dry run on meta tensors. Raises ReceiverError('plan', name, ...) for the tensor that does not fit."""
        return DryRun(self._model).run(plan)

    def begin(self, layout: Layout, *, layerwise: bool = False) -> None:
        """Start a sync; ``layerwise`` forces vLLM's layerwise reload.

        Raises ReceiverError('plan', name, ...) for a module whose processing cannot be repeated exactly.
        """
        if layout.problem and not layerwise:
            name, reason = layout.problem
            raise ReceiverError("plan", name, f"{reason}; apply='layerwise' reloads it by vLLM's own, unproven way")
        self._loaded, self._layout = set(), layout
        if layout.direct and not layerwise:
            self._active = DirectLoader(self._model, self._scratch, layout)
        else:
            self._active = LayerwiseLoader(self._model, self._model_config)

    @torch.no_grad()
    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Load one bucket; its memory may be reused when this returns. Raises ReceiverError('load', name, ...)."""
        self._active.load(bucket, bytes_N)
        self._loaded.update(slot.name for slot in bucket.slots)
        synchronize(self._device)

    @torch.no_grad()
    def finish(self) -> int:
        """Complete the sync; returns the number of tensors loaded. Raises ReceiverError('count', name, ...)."""
        self._active.finish()
        derive_copies(self._model)
        synchronize(self._device)
        return len(self._loaded)

    def verifier(self) -> Verifier:
        """Compares the loaded parameters with a second transfer."""
        return Verifier(self._model, self._device, self._scratch, self._layout)

    def abort(self) -> None:
        """Restore the model's modules after a failed sync."""
        for target in self._scratch.users():
            target.module._parameters[target.name] = target.live  # type: ignore[assignment]
            self._scratch.release(target)
        self._active.abort()


class DirectLoader:
    """Writes into the live parameters; processes a module when it is complete."""

    def __init__(self, model: nn.Module, scratch: ScratchPool, layout: Layout) -> None:
        """Start a sync."""
        self._model: Any = model
        self._scratch = scratch
        self._layout = layout
        self._arrivals = Arrivals(layout)
        for target in layout.targets:
            is_padded = target.in_place and isinstance(target.module, VocabParallelEmbedding)
            if is_padded and 0 < target.received < target.live.numel():
                # A server that started with random weights has some in the padding of its vocabulary too.
                target.live.data.view(-1)[target.received :].zero_()

    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Load one bucket; its memory may be reused after the device has finished the copies."""
        copies = self._layout.copies_of(bucket)
        for copy in copies:
            self._prepare(copy.target, bytes_N)
        if self._layout.replayable:
            self._replay(bucket, bytes_N)
        else:
            load_by_name(self._model, bucket, bytes_N)
        for copy in copies:
            targets = self._arrivals.completed_by(copy)
            if targets and not copy.target.in_place:
                self._process(targets)

    def finish(self) -> None:
        """Check that every parameter is complete. Raises ReceiverError('count', name, ...)."""
        self._arrivals.check_complete("did not arrive")

    def abort(self) -> None:
        """Put the live parameters back. ModelLoader releases the scratch buffers."""
        for target in self._layout.targets:
            target.module._parameters[target.name] = target.live  # type: ignore[assignment]

    def _prepare(self, target: Target, bytes_N: Tensor) -> None:
        """Give a packed layer a plain parameter to load: a view of the bucket, or a scratch buffer."""
        if target.in_place or target in self._scratch or target.module._parameters[target.name] is not target.live:
            return
        if target in self._layout.contiguous:
            start = self._layout.contiguous[target][1]
            flat = bytes_N[start : start + target.meta.numel() * target.meta.element_size()].view(target.meta.dtype)
        else:
            flat = self._scratch.acquire(target)
            if target.received < target.meta.numel():
                flat.zero_()  # padding
        target.module._parameters[target.name] = like(target.meta, flat)  # type: ignore[assignment]

    def _replay(self, bucket: Bucket, bytes_N: Tensor) -> None:
        targets, sources = [], []
        for slot in bucket.slots:
            received: Tensor | None = None
            for copy in self._layout.copies[slot.name]:
                if not copy.target.in_place and copy.target in self._layout.contiguous:
                    continue  # the parameter is a view of the bucket
                received = slot_view(bytes_N, slot) if received is None else received
                parameter = copy.target.module._parameters[copy.target.name]
                assert parameter is not None
                targets.append(_view(parameter.data, copy.to_view))
                sources.append(_view(received, copy.from_view))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _process(self, targets: list[Target]) -> None:
        module, raw = targets[0].module, {}
        for target in targets:
            raw[target.name] = module._parameters[target.name]
            module._parameters[target.name] = target.live  # type: ignore[assignment]
        process_again(module, raw)
        for target in targets:
            if target in self._scratch:
                self._scratch.release(target)


class LayerwiseLoader:
    """vLLM's layerwise reload, for quantized and other layers that transform their weights after loading."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        """Start a sync: the parameters move to the meta device."""
        self._model: Any = model
        self._model_config = model_config
        initialize_layerwise_reload(model)
        self._restore_kernels = first_processing(model)
        self._is_reloading = True

    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Load one bucket and clone its tensors that are still pending."""
        load_by_name(self._model, bucket, bytes_N)
        storage = storage_id(bytes_N)
        for module in self._model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, Tensor) and storage_id(value) == storage:
                        bound.arguments[key] = value.clone()

    def finish(self) -> None:
        """Process the remaining layers."""
        finalize_layerwise_reload(self._model, self._model_config)
        self._restore_kernels()
        self._is_reloading = False

    def abort(self) -> None:
        """Restore the parameters, which would stay on the meta device. Values may be mixed until a full resend."""
        if self._is_reloading:
            self._is_reloading = False
            self._restore_kernels()
            for module in self._model.modules():
                info = get_layerwise_info(module)
                if info.can_load():
                    _restore_tensors(module, info)


def load_by_name(model: Any, bucket: Bucket, bytes_N: Tensor) -> None:
    """Pass a bucket to the model's ``load_weights``. Raises ReceiverError('load', name, ...)."""
    current = ""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal current
        for slot in bucket.slots:
            current = slot.name
            yield slot.name, slot_view(bytes_N, slot)

    try:
        model.load_weights(tensors())
    except Exception as error:
        raise ReceiverError("load", current, f"{type(error).__name__}: {error}") from error


def derive_copies(model: nn.Module) -> None:
    """Fill packed copies again that are kept next to a plain weight: of embeddings and output heads on the CPU.

    vLLM's own finalization skips a head that is tied to the embedding, which would keep the old policy's packed copy.
    An embedding that is not a head never multiplies with its packed copy, so that copy is freed.
    """
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    for module in model.modules():
        record = record_of(module)
        if record is None or not record.copies or record.changed:
            continue
        if has_head and isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            module.cpu_linear = nn.functional.linear
        else:
            process_again(module, {})


def process_again(module: nn.Module, raw: Mapping[str, Any]) -> None:
    """Process the parameters ``raw``, else the module's own, and take over the results.

    Frees old packed copies first, so that new ones reuse their mapped pages.
    """
    record = known_record(module)
    for name in record.copies:
        if not isinstance(module.__dict__[name], Tensor):
            module.__dict__[name] = None
    take_over(module, processed(module, raw))


def _view(tensor: Tensor, view: tuple[tuple[int, ...], tuple[int, ...], int]) -> Tensor:
    size, stride, offset = view
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _restore_tensors(module: nn.Module, info: Any) -> None:
    """Restore the tensors of one module that the layerwise reload has replaced."""
    parameters, buffers = info.kernel_tensors
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:  # an absent bias is registered as None and stays None
            delattr(module, name)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    non_persistent: set[str] = getattr(info, "kernel_non_persistent_buffers", set())
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=name not in non_persistent)
    info.reset()
