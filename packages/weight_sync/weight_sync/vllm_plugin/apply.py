"""Loading received tensors into vLLM's model, in one of two ways.

direct     dense unquantised models: the copies that the dry run wrote down are replayed on the live parameters. vLLM's
           CPU build keeps linear weights packed and drops the plain ones: there a layer is packed straight out of the
           bucket when its bytes lie there in one piece, else it is assembled in a reused scratch buffer first.
layerwise  everything else: vLLM's own layerwise reload, which holds on to tensors until a layer is complete, so what is
           pending when a bucket's memory is about to be reused is copied.
"""

from collections.abc import Iterator
from typing import Any, Protocol

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
from ..sources.base import slot_view
from .layout import DryRun, Layout, Target, like
from .scratch import ScratchPool
from .verify import Verifier


class Loader(Protocol):
    """One way to load."""

    def begin(self, layout: Layout) -> None:
        """A new sync."""

    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Load one bucket; its memory may be reused when this returns."""

    def finish(self) -> None:
        """Everything has come."""

    def abort(self) -> None:
        """Put the model's structure back after a failed sync; its values may be mixed until a full resend."""


class ModelLoader:
    """Checks plans against one model and loads their buckets into it."""

    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        self._scratch = ScratchPool(device)
        self._direct = DirectLoader(model, device, self._scratch)
        self._layerwise = LayerwiseLoader(model, model_config)
        self._verifier = Verifier(model, device, self._scratch)
        self._active: Loader = self._direct
        self._layout = Layout()
        self._loaded: set[str] = set()

    def check(self, plan: BucketPlan) -> Layout:
        """Dry run on meta tensors. Raises ReceiverError('plan', name, ...) naming the tensor that does not fit."""
        return DryRun(self._model, self._device).run(plan)

    def begin(self, layout: Layout, *, layerwise: bool = False) -> None:
        """Start receiving; ``layerwise`` insists on vLLM's own reload."""
        self._loaded, self._layout = set(), layout
        self._active = self._direct if layout.direct and not layerwise else self._layerwise
        self._active.begin(layout)

    @torch.no_grad()
    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Load one bucket; its memory may be reused when this returns. Raises ReceiverError('load', name, ...)."""
        self._active.load(bucket, bytes_N)
        self._loaded.update(slot.name for slot in bucket.slots)
        self._synchronize()

    @torch.no_grad()
    def finish(self) -> int:
        """Process what remains; the number of tensors loaded. Raises ReceiverError('count', name, ...)."""
        self._active.finish()
        if self._device.type == "cpu":
            pack_heads(self._model)
        self._synchronize()
        return len(self._loaded)

    def begin_verify(self) -> None:
        """Start comparing what was loaded with a second sending."""
        self._verifier.begin(self._layout)

    @torch.no_grad()
    def verify(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """Compare one bucket; its memory may be reused when this returns.

        Raises ReceiverError('verify', name, ...) at the first difference.
        """
        self._verifier.verify(bucket, bytes_N)
        self._synchronize()  # a bucket that completes no parameter was only copied, and nothing waited for that

    def finish_verify(self) -> int:
        """The number of tensors compared. Raises ReceiverError('count', name, ...)."""
        return self._verifier.finish()

    def abort(self) -> None:
        """Put the model's structure back after a failed sync."""
        for target in self._scratch.users():
            target.module._parameters[target.name] = target.live  # type: ignore[assignment]
            self._scratch.release(target)
        self._active.abort()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class DirectLoader:
    """Writes into the live parameters; packs CPU layers one by one as they complete."""

    def __init__(self, model: nn.Module, device: torch.device, scratch: ScratchPool) -> None:
        self._model: Any = model
        self._device = device
        self._scratch = scratch
        self._layout = Layout()
        self._left: dict[Target, int] = {}

    def begin(self, layout: Layout) -> None:
        """See Loader."""
        self._layout = layout
        self._left = {target: target.received for target in layout.targets}

    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """See Loader."""
        for slot in bucket.slots:
            for copy in self._layout.copies[slot.name]:
                self._prepare(copy.target, bytes_N)
        if self._layout.replayable:
            self._replay(bucket, bytes_N)
        else:
            load_by_name(self._model, bucket, bytes_N)
        for slot in bucket.slots:
            for copy in self._layout.copies[slot.name]:
                self._left[copy.target] -= copy.numel
                if self._left[copy.target] == 0 and not copy.target.in_place:
                    self._pack(copy.target)

    def finish(self) -> None:
        """See Loader."""
        for target, left in self._left.items():
            if left:
                raise ReceiverError("count", target.qualname, f"{left} of {target.received} elements did not arrive")

    def abort(self) -> None:
        """The live parameters stay where they are; ModelLoader takes the scratch buffers back."""
        for target in self._layout.targets:
            target.module._parameters[target.name] = target.live  # type: ignore[assignment]

    def _prepare(self, target: Target, bytes_N: Tensor) -> None:
        """Give a packed layer a plain parameter to load into: the bucket itself, or a scratch buffer."""
        if target.in_place or target in self._scratch or target.module._parameters[target.name] is not target.live:
            return
        if target in self._layout.whole:
            start = self._layout.whole[target][1]
            flat = bytes_N[start : start + target.meta.numel() * target.meta.element_size()].view(target.meta.dtype)
        else:
            flat = self._scratch.acquire(target)
        target.module._parameters[target.name] = like(target.meta, flat)  # type: ignore[assignment]

    def _replay(self, bucket: Bucket, bytes_N: Tensor) -> None:
        to, sources = [], []
        for slot in bucket.slots:
            received: Tensor | None = None
            for copy in self._layout.copies[slot.name]:
                if not copy.target.in_place and copy.target in self._layout.whole:
                    continue  # the parameter is the bucket
                received = slot_view(bytes_N, slot) if received is None else received
                parameter = copy.target.module._parameters[copy.target.name]
                assert parameter is not None
                to.append(_view(parameter.data, copy.to_view))
                sources.append(_view(received, copy.from_view))
        if to:
            torch._foreach_copy_(to, sources)

    def _pack(self, target: Target) -> None:
        repack(target.module)
        target.module._parameters[target.name] = target.live  # type: ignore[assignment]
        if target in self._scratch:
            self._scratch.release(target)


class LayerwiseLoader:
    """vLLM's own reload, for quantised layers and whatever else changes its weights after loading."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model: Any = model
        self._model_config = model_config
        self._reloading = False

    def begin(self, layout: Layout) -> None:
        """See Loader."""
        initialize_layerwise_reload(self._model)
        self._reloading = True

    def load(self, bucket: Bucket, bytes_N: Tensor) -> None:
        """See Loader."""
        load_by_name(self._model, bucket, bytes_N)
        storage = bytes_N.untyped_storage().data_ptr()
        for module in self._model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if _lies_in(value, storage):
                        bound.arguments[key] = value.clone()

    def finish(self) -> None:
        """See Loader."""
        finalize_layerwise_reload(self._model, self._model_config)
        self._reloading = False

    def abort(self) -> None:
        """See Loader. vLLM would leave the parameters on the meta device."""
        if self._reloading:
            self._reloading = False
            for module in self._model.modules():
                info = get_layerwise_info(module)
                if info.can_load():
                    _place_back(module, info)


def load_by_name(model: Any, bucket: Bucket, bytes_N: Tensor) -> None:
    """Feed a bucket to the model's ``load_weights``. Raises ReceiverError('load', name, ...)."""
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


def pack_heads(model: nn.Module) -> None:
    """On the CPU, embeddings and heads keep their plain weight and a packed copy: renew it.

    vLLM's own finalisation misses a head tied to the embedding and would leave the old policy's there. An embedding
    that is no head never multiplies with its packed copy: it is dropped for the plain weight.
    """
    embeddings: list[Any] = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    has_head = any(isinstance(m, ParallelLMHead) for m in embeddings)
    for module in embeddings:
        if not hasattr(module, "cpu_linear"):
            continue
        if isinstance(module, ParallelLMHead) or not has_head:
            repack(module)
        else:
            module.cpu_linear = nn.functional.linear


def repack(module: Any) -> None:
    """Pack a CPU layer's weight. The old packed copy goes first, so that its warm pages are used for the new one."""
    module.cpu_linear = None
    module.quant_method.process_weights_after_loading(module)


def _view(tensor: Tensor, view: tuple[tuple[int, ...], tuple[int, ...], int]) -> Tensor:
    size, stride, offset = view
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _lies_in(value: Any, storage_ptr: int) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == storage_ptr


def _place_back(module: nn.Module, info: Any) -> None:
    """Undo layerwise reload's replacement of one module's tensors."""
    parameters, buffers = info.kernel_tensors
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:  # a bias that a layer does not have is registered as None and stays so
            delattr(module, name)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    non_persistent: set[str] = getattr(info, "kernel_non_persistent_buffers", set())
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=name not in non_persistent)
    info.reset()
