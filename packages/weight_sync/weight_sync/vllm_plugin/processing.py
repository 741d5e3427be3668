"""Record of vLLM's processing after loading, by module, and the same processing for pushed weights.

After loading a model, vLLM calls ``process_weights_after_loading``: it may pack weights at the same shape (experts on
the CPU), replace them, or keep packed copies next to them. Bytes may be written into a parameter only if processing
left it unchanged. A class name does not tell, so every parameter is hashed before and after. For each kind of module
that changed, the recorded processing is repeated on a copy of the smallest such module and must give the bytes that the
model computes with; otherwise pushes into that kind are rejected.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors import as_bytes, digest, like, num_wrong_bytes, storage_id
from .patch import FENCE

PATCH = FENCE.patch(
    name="loading record",
    reason="finds out which parameters vLLM packs after loading, and repeats that for pushed weights",
    otherwise="refused",
    replaces={
        "vllm.model_executor.model_loader.base_loader": (
            "process_weights_after_loading(model, model_config, target_device, ...)",
        )
    },
    reads={
        "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase": (
            "process_weights_after_loading(layer, ...)",
        ),
        "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase",),
        "vllm.model_executor.layers.attention": ("MMEncoderAttention",),
        "vllm.model_executor.layers.attention:MLAAttention": ("process_weights_after_loading(act_dtype, ...)",),
    },
)

_RECORD = "_weight_sync_record"
_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()


@dataclass
class _State:
    """The attributes of an object that processing created or replaced, the latter with their earlier values."""

    created: frozenset[str] = frozenset()
    replaced: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> "_State":
        changed = {name: value for name, value in before.items() if after.get(name, _MISSING) is not value}
        return cls(frozenset(after.keys() - before.keys()), changed)

    def rewind(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """``attributes`` as before processing."""
        return {name: value for name, value in attributes.items() if name not in self.created} | self.replaced


@dataclass(eq=False)
class Record:
    """Record of the processing of one module."""

    dtype: torch.dtype
    """The model's dtype, an argument of an attention layer's processing."""

    layouts: dict[str, tuple[Any, ...]]
    """Shape, stride and dtype of each parameter before processing."""

    changed: frozenset[str] = frozenset()
    """Parameters that processing changed."""

    derived: frozenset[str] = frozenset()
    """Parameters that processing created."""

    copies: frozenset[str] = frozenset()
    """Attributes that processing filled with tensors, such as a packed copy of the weight."""

    module_state: _State = field(default_factory=_State)
    method_state: _State = field(default_factory=_State)

    problem: str = ""
    """Reason why the processing cannot be repeated; empty when it was proven to give the same bytes."""


def record_of(module: nn.Module) -> Record | None:
    """The module's record. None: vLLM loaded it without this package's hook."""
    record: Record | None = module.__dict__.get(_RECORD)
    return record


def known_record(module: nn.Module) -> Record:
    """The record of a module that vLLM loaded with this package's hook."""
    record = record_of(module)
    assert record is not None
    return record


def recording(process_weights: Callable[..., None]) -> Callable[..., None]:
    """vLLM's ``process_weights_after_loading`` of a whole model, which then leaves a Record on every module."""

    @torch.no_grad()
    def process(model: nn.Module, model_config: Any, target_device: torch.device) -> None:
        try:
            before = {module: _Before(module) for module in model.modules()}
            samples = {seen.kind: module for module, seen in reversed(before.items()) if _has_processing(module)}
            raw = {
                kind: {
                    name: like(param, param.detach().to("cpu", copy=True))
                    for name, param in sample._parameters.items()
                    if param is not None
                }
                for kind, sample in samples.items()
            }
        except Exception as error:  # every server of this Python comes here, also those without weight sync
            before, samples, raw = {}, {}, {}
            _mark(model, Record(model_config.dtype, {}, problem=f"it cannot be read: {type(error).__name__}: {error}"))
        process_weights(model, model_config, target_device)
        try:
            for module, seen in before.items():
                module.__dict__[_RECORD] = seen.compare(module, model_config.dtype)
            problems = {kind: _disproof(sample, raw[kind]) for kind, sample in samples.items()}
            for module, seen in before.items():
                record = known_record(module)
                record.problem = record.problem or problems.get(seen.kind, "")
        except Exception as error:
            _mark(model, Record(model_config.dtype, {}, problem=f"it cannot be read: {type(error).__name__}: {error}"))

    return process


def _mark(model: nn.Module, record: Record) -> None:
    for module in model.modules():
        module.__dict__[_RECORD] = record


@torch.no_grad()
def processed(module: nn.Module, raw: Mapping[str, Tensor]) -> nn.Module:
    """A stand-in for ``module`` with the parameters ``raw`` (else the module's own), processed as after loading."""
    record = known_record(module)
    attributes = {name: value for name, value in module.__dict__.items() if name not in _TABLES}
    stand_in: nn.Module = object.__new__(type(module))
    stand_in.__dict__ |= record.module_state.rewind(attributes)
    stand_in.__dict__["_parameters"] = {
        name: raw.get(name, param) for name, param in module._parameters.items() if name not in record.derived
    }
    stand_in.__dict__ |= {"_buffers": dict(module._buffers), "_modules": dict(module._modules)}
    method: Any = getattr(module, "quant_method", None)
    if _is_quant_method(method):
        fresh = object.__new__(type(method))
        fresh.__dict__ |= record.method_state.rewind(method.__dict__)
        stand_in.__dict__["quant_method"] = fresh
        fresh.process_weights_after_loading(stand_in)
    if _is_attention(module):
        stand_in.process_weights_after_loading(record.dtype)  # type: ignore[operator]
    return stand_in


@torch.no_grad()
def take_over(module: nn.Module, done: nn.Module) -> None:
    """Copy the tensors of a processed stand-in into the module's own, whose addresses stay."""
    record = known_record(module)
    for name in record.changed | record.derived:
        live, new = module._parameters[name], done._parameters[name]
        assert live is not None
        assert new is not None
        if new is not live:
            live.data.copy_(new.data)
    for name in record.copies:
        live, new = module.__dict__[name], done.__dict__[name]
        if isinstance(live, Tensor):
            live.copy_(new)
        else:
            module.__dict__[name] = new


def difference(module: nn.Module, done: nn.Module) -> str:
    """Differences between the tensors that the module computes with and those of a processed stand-in; empty: none."""
    record = known_record(module)
    for name in sorted(record.changed | record.derived | record.copies):
        live = module._parameters.get(name, module.__dict__.get(name))
        new = done._parameters.get(name, done.__dict__.get(name))
        if not isinstance(live, Tensor) or not isinstance(new, Tensor):
            continue  # a packed copy behind a function: the verifier multiplies with it
        if live.shape != new.shape or live.dtype != new.dtype:
            return f"{name} is {new.dtype} {list(new.shape)} instead of {live.dtype} {list(live.shape)}"
        if wrong := num_wrong_bytes(live, new):
            return f"{wrong} bytes of the processed {name}"
    return ""


def first_processing(model: nn.Module) -> Callable[[], None]:
    """Let vLLM process weights as if it had not before; returns a function that restores the earlier kernels.

    A quantization method that has a kernel already skips a part of its processing (experts on the CPU are not packed).
    """
    undo: list[tuple[Any, dict[str, Any]]] = []
    for module in model.modules():
        record = record_of(module)
        if record is not None and record.changed and _is_quant_method(getattr(module, "quant_method", None)):
            method: Any = module.quant_method
            undo.append((method, method.__dict__))
            method.__dict__ = record.method_state.rewind(method.__dict__)

    def restore() -> None:
        for method, attributes in undo:
            method.__dict__ = attributes

    return restore


class _Before:
    """One module before processing."""

    def __init__(self, module: nn.Module) -> None:
        method = getattr(module, "quant_method", None)
        self.tensors = {name: _Seen(tensor) for name, tensor in _own_tensors(module)}
        self.kind = (type(module), type(method), *((name, seen.layout) for name, seen in self.tensors.items()))
        self._attributes, self._method_attributes = _attributes(module), _attributes(method)
        self._held = list(_tensors_in([self._attributes, self._method_attributes]))

    def compare(self, module: nn.Module, dtype: torch.dtype) -> Record:
        """The record of the module after processing."""
        after = {name: _Seen(tensor) for name, tensor in _own_tensors(module)}
        known = {name: seen for name, seen in self.tensors.items() if not seen.is_buffer}
        unclear = _has_processing(module)  # packing a constant tensor does not change it
        changed = {name for name, seen in known.items() if after.get(name) != seen or (unclear and seen.is_constant)}
        attributes, method_attributes = _attributes(module), _attributes(getattr(module, "quant_method", None))
        record = Record(
            dtype=dtype,
            layouts={name: seen.layout for name, seen in known.items()},
            changed=frozenset(changed),
            derived=frozenset(name for name, seen in after.items() if name not in self.tensors and not seen.is_buffer),
            module_state=_State.between(self._attributes, attributes),
            method_state=_State.between(self._method_attributes, method_attributes),
        )
        out_of_reach = [name for name in changed if name not in after]
        buffers = {name for name, seen in self.tensors.items() if seen.is_buffer and after.get(name) != seen}
        out_of_reach += buffers - (_default_scales(module) if _is_attention(module) else set())
        own = {storage_id(tensor) for tensor in (*self._held, *(tensor for _, tensor in _own_tensors(module)))}
        on_gpu = any(tensor.is_cuda for _, tensor in _own_tensors(module))
        for name, value in attributes.items():
            if all(storage_id(tensor) in own for tensor in _tensors_in(value)):
                continue
            is_new = name in record.module_state.created or name in record.module_state.replaced
            if is_new and (isinstance(value, Tensor) or (callable(value) and not on_gpu)):
                # An attention's are scales of the KV cache. A CUDA graph would keep the tensors of a replaced function.
                record.copies |= set() if _is_attention(module) else {name}
            else:
                out_of_reach.append(name)
        if any(storage_id(tensor) not in own for tensor in _tensors_in(method_attributes)):
            out_of_reach.append("quant_method")
        if out_of_reach:
            record.problem = f"vLLM's processing changed {', '.join(sorted(out_of_reach))}, which cannot be repeated"
        return record


class _Seen:
    """Layout and contents of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.layout = layout_of(tensor)
        self.is_buffer = not isinstance(tensor, nn.Parameter)
        size = tensor.element_size()
        bytes_N = torch.empty(0) if tensor.is_meta else as_bytes(tensor)
        self.is_constant = bytes_N.numel() > size and torch.equal(bytes_N[size:], bytes_N[:-size])
        self._digest = (0, 0) if tensor.is_meta else digest(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and (self.layout, self._digest) == (other.layout, other._digest)

    __hash__ = None  # type: ignore[assignment]


def _default_scales(module: nn.Module) -> set[str]:
    """Buffers of one element with the value 1, an attention's default scales of the KV cache.

    Random weights (``--load-format dummy``) fill them too, and processing sets them back, whatever is pushed.
    """
    return {
        name for name, tensor in module._buffers.items() if tensor is not None and tensor.numel() == 1 and tensor == 1
    }


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, stride and dtype."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _disproof(sample: nn.Module, raw: Mapping[str, Tensor]) -> str:
    """Repeat the processing of a module on copies of its parameters: why that is not exact, or an empty string."""
    record = known_record(sample)
    if record.problem or not record.changed | record.derived | record.copies:
        return record.problem
    device = next((tensor.device for _, tensor in _own_tensors(sample)), torch.device("cpu"))
    try:
        done = processed(sample, {name: like(tensor, tensor.to(device)) for name, tensor in raw.items()})
        wrong = difference(sample, done)
    except Exception as error:
        return f"vLLM's processing cannot be repeated: {type(error).__name__}: {error}"
    return wrong and f"vLLM's processing gives other weights when it is repeated: {wrong}"


def _has_processing(module: nn.Module) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method: Any = getattr(module, "quant_method", None)
    default = QuantizeMethodBase.process_weights_after_loading
    return _is_attention(module) or (
        _is_quant_method(method) and type(method).process_weights_after_loading is not default
    )


def _is_quant_method(method: Any) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(method, QuantizeMethodBase)


def _is_attention(module: nn.Module) -> bool:
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    has_method = callable(getattr(module, "process_weights_after_loading", None))
    return has_method and isinstance(module, (AttentionLayerBase, MMEncoderAttention))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def _attributes(owner: Any) -> dict[str, Any]:
    hidden = (*_TABLES, _RECORD, "quant_method")
    return {name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in hidden}


def _tensors_in(value: Any, depth: int = 5) -> Iterator[Tensor]:
    """Tensors in containers, in functions' closures and in the attributes of plain objects."""
    if isinstance(value, Tensor):
        if value.numel():
            yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, functools.partial):
        inner = (value.args, value.keywords)
    elif isinstance(value, FunctionType):
        inner = (value.__defaults__, [cell.cell_contents for cell in value.__closure__ or ()])
    elif not isinstance(value, (nn.Module, type)) and not type(value).__module__.startswith("vllm.config"):
        inner = list(getattr(value, "__dict__", {}).values())
    if depth:
        for each in inner:
            yield from _tensors_in(each, depth - 1)
