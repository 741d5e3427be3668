"""LoRA through PEFT: adapters on frozen linear layers, and the names and tensors used to export them.

y = W x + s * B (A dropout(x)),   s = alpha / rank, or alpha / sqrt(rank) with rslora

PEFT replaces each adapted `q_proj` by a layer that holds the frozen weight as `q_proj.base_layer.weight` and the two
trained matrices as `q_proj.lora_A.default.weight` [rank, in] and `q_proj.lora_B.default.weight` [out, rank]. The model
keeps its class; only parameter names change, and the export restores them: `whole_tensors` returns merged weights under
Hugging Face names, `adapter_tensors` the trained tensors under the names of PEFT's adapter files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from plinth_base.adapters import ADAPTER_NAME, PEFT_PREFIX, without_adapter

from ..errors import ModelError
from ..upstream import FENCE
from .folder_names import TensorView, folder_views
from .nf4 import Nf4Linear, Nf4Packing, nf4_packings
from .parts import VALUE_HEAD, linear_layers, vision_names

if TYPE_CHECKING:
    from ..batch import Head
    from ..config import LoraConfig


OFF = FENCE.patch(
    name="adapters off",
    reason="PEFT's own switch also toggles requires_grad, which DeepSpeed's hooks must not see",
    otherwise="refused",
    replaces={"peft.tuners.tuners_utils:BaseTunerLayer": ("_disable_adapters",)},
    reads={"peft.tuners.lora:LoraLayer": ("lora_A", "lora_B", "scaling")},
)

MAMBA = FENCE.patch(
    name="adapters of Mamba layers",
    reason="PEFT refuses the output projections of some Mamba layers, which all-linear must leave out",
    otherwise="stock path",
    reads={"peft.tuners.tuners_utils": ("_check_lora_target_modules_mamba(peft_config, model, target_name)",)},
)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The update an adapter adds to a frozen weight: scale * B @ A."""

    a_RI: nn.Parameter
    """[rank, in]"""
    b_OR: nn.Parameter
    """[out, rank]"""
    scale: float

    @property
    def parts(self) -> list[nn.Parameter]:
        """Parameters that must be gathered before `merged`, besides the weight."""
        return [self.a_RI, self.b_OR]

    def merged(self, weight_OI: Tensor) -> Tensor:
        """weight + scale * B @ A in fp32. At stage 3 all three must be gathered."""
        return torch.addmm(weight_OI.float(), self.b_OR.float(), self.a_RI.float(), alpha=self.scale)


@dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """A tensor to export, and the parameters it is computed from."""

    name: str
    parameter: Tensor
    """A parameter, or a persistent buffer."""
    low_rank: LowRank | None = None
    packed: Nf4Packing | TensorView | None = None
    """Recipe that reads the tensor from the parameter: shape and dtype of an NF4 weight, or its part."""

    @property
    def parts(self) -> list[Tensor]:
        """Parameters that must be gathered before `value`."""
        return [self.parameter, *(self.low_rank.parts if self.low_rank else [])]

    @property
    def num_bytes(self) -> int:
        """Bytes of the gathered parts and, for NF4, of the dequantized weight."""
        unpacked = self.packed.numel * self.packed.dtype.itemsize if isinstance(self.packed, Nf4Packing) else 0
        return unpacked + sum(getattr(part, "ds_numel", part.numel()) * part.element_size() for part in self.parts)

    @property
    def meta(self) -> Tensor:
        """An empty meta tensor of the whole tensor's shape and dtype; gathers nothing."""
        holder: Any = self.packed or self.parameter
        return torch.empty(getattr(holder, "ds_shape", holder.shape), dtype=holder.dtype, device="meta")

    @torch.no_grad()
    def value(self, dtype: torch.dtype | None = None, *, copy: bool = False) -> Tensor:
        """The tensor in `dtype` (default: its own); a copy only if a cast, an adapter, NF4 or `copy` requires one.

        Buffers keep their dtype: integers, and the routers' biases that transformers keeps in fp32.
        """
        dtype = dtype if isinstance(self.parameter, nn.Parameter) else None
        weight = self.parameter.detach()
        if self.packed is not None:
            weight, copy = self.packed.unpack(weight), copy and isinstance(self.packed, TensorView)
        if self.low_rank is not None:
            return self.low_rank.merged(weight).to(dtype or weight.dtype)
        return weight.to(dtype or weight.dtype, copy=copy)


def add_adapters(model: Any, lora: LoraConfig, *, head: Head, seed: int, vision: bool = False) -> None:
    """Freeze `model` and add adapters to its linear layers, in place; a value head remains trainable.

    Adapters are initialized to a zero change (B = 0, A drawn with `seed`), identical on every rank and at every stage.

    Args:
        vision: add them to a vision tower and projector too.

    Raises:
        EngineConfigError: PEFT is not installed, or not in a tested version.
        ModelError: a name in `target_modules` matches no linear layer of the backbone, the experts of a mixture, or
            layers that share a weight.
    """
    OFF.check()
    import peft

    others = "|".join(map(re.escape, vision_names(model)))
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=_target_names(model, lora, vision),
        exclude_modules=rf"({others})\..*" if others and not vision else None,
        task_type="SEQ_CLS" if head == "value" else "CAUSAL_LM",
        base_model_name_or_path=getattr(model, "name_or_path", None),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not get_peft_model: it wraps the model and changes every parameter name.
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER_NAME)
    _check_layers(model)
    if head == "value":
        # Set after injection, for adapter_config.json only: otherwise PEFT trains a copy of the head under a new name.
        settings.modules_to_save = [VALUE_HEAD]
        getattr(model, VALUE_HEAD).requires_grad_(True)


def _target_names(model: Any, lora: LoraConfig, vision: bool) -> list[str]:
    """Target modules as PEFT matches them and writes them to adapter_config.json: suffixes of layer names."""
    layers = linear_layers(model, nn.Linear, Nf4Linear, vision=vision)
    weights = Counter(id(layer.weight) for layer in layers.values())
    # Exports have one weight where layers share one (Zamba2). Mamba layers read dt_proj's without calling it, so an
    # adapter would not be trained.
    layers = {n: one for n, one in layers.items() if weights[id(one.weight)] == 1 and not n.endswith(".dt_proj")}
    if not layers:
        raise ModelError(f"{type(model).__name__} has no linear layer in its backbone to adapt")
    if lora.target_modules == "all-linear" and vision:
        return list(layers)  # last parts of a tower's names are also those of other modules
    if lora.target_modules == "all-linear":
        last = {name: name.rpartition(".")[2] for name in layers}
        # The number of a layer in a list is also the number of other modules.
        suffixes = {name if part.isdigit() else part for name, part in last.items()}
        return sorted(suffix for suffix in suffixes if _is_adapted(model, suffix))
    unknown = [t for t in lora.target_modules if not any(n == t or n.endswith(f".{t}") for n in layers)]
    if unknown:
        known = sorted({name.rpartition(".")[2] for name in layers})
        raise ModelError(
            f"they match no linear layer of {type(model).__name__}'s backbone (the head cannot be adapted: the "
            "log-prob function reads its weight)",
            field="lora.target_modules",
            value=unknown,
            allowed=", ".join(known),
        )
    return list(lora.target_modules)


def _is_adapted(model: Any, name: str) -> bool:
    """False if PEFT refuses adapters of layers with this name in this model."""
    if MAMBA.check():
        from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

        try:
            _check_lora_target_modules_mamba(cast("Any", SimpleNamespace(peft_type="LORA")), model, name)
        except ValueError:
            return False
    return True


def _check_layers(model: Any) -> None:
    """Refuse adapters of experts and of shared weights: PEFT adds them for names that other linear layers have, too."""
    inside = [(name, layer) for name, layer in _layers(model) if not isinstance(layer.get_base_layer(), nn.Linear)]
    if inside:
        name, layer = inside[0]
        others = {name.rpartition(".")[2] for name, layer in _layers(model) if isinstance(layer.base_layer, nn.Linear)}
        allowed = sorted(others - {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
        raise ModelError(
            f"it adapts {name.replace('.base_layer', '')}.{layer.parameter_name} of {type(model).__name__}, and "
            "adapters of experts cannot be merged for exports and syncs",
            field="lora.target_modules",
            allowed=", ".join(allowed),
        )
    weights = Counter(id(layer.get_base_layer().weight) for _, layer in _layers(model))
    for name, layer in _layers(model):
        if weights[id(layer.get_base_layer().weight)] > 1:
            raise ModelError(f"it adapts {name}, whose weight other layers share", field="lora.target_modules")


def has_adapters(module: nn.Module) -> bool:
    """True if `add_adapters` has added adapters to `module`."""
    return getattr(module, "peft_config", None) is not None


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if not has_adapters(module):
        return
    from peft.tuners.lora import LoraLayer

    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            yield name, layer


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Context in which `module` computes without its adapters: the base model."""
    OFF.check()
    restores = [OFF.replace(layer, _disable_adapters=True) for _, layer in list(_layers(module))]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def low_rank_terms(module: nn.Module) -> dict[str, LowRank]:
    """The low-rank update of each adapted weight, keyed by parameter name in `module`; empty without adapters."""
    return {
        f"{name}.base_layer.weight": LowRank(
            a_RI=layer.lora_A[ADAPTER_NAME].weight,
            b_OR=layer.lora_B[ADAPTER_NAME].weight,
            scale=layer.scaling[ADAPTER_NAME],
        )
        for name, layer in _layers(module)
    }


def whole_tensors(module: nn.Module, *, merged: bool = True) -> list[NamedTensor]:
    """The model's tensors as its folder has them: parameters, then persistent buffers, in the model's order.

    Names and shapes are those of the Hugging Face folder; tied parameters appear once. Parts of one parameter, such as
    the experts of a layer, follow one another.

    Args:
        merged: merge the adapters into the weights; False returns the frozen base model.
    """
    terms = low_rank_terms(module)
    packed = nf4_packings(module)
    adapters = {id(p) for term in terms.values() for p in (term.a_RI, term.b_OR)}
    held = [
        NamedTensor(
            name=name.replace(".base_layer.", "."),
            parameter=parameter,
            low_rank=terms.get(name) if merged else None,
            packed=packed.get(name),
        )
        for name, parameter in (*module.named_parameters(), *_persistent_buffers(module))
        if id(parameter) not in adapters
    ]
    views = folder_views(module, {tensor.name: tensor.meta for tensor in held})
    return [part for tensor in held for part in _parts_in_folder(tensor, views[tensor.name])]


def _parts_in_folder(tensor: NamedTensor, views: list[TensorView]) -> list[NamedTensor]:
    if len(views) == 1 and views[0].shape == tuple(tensor.meta.shape) and views[0].stride == tensor.meta.stride():
        return [replace(tensor, name=views[0].name)]
    assert tensor.low_rank is None, f"{tensor.name} has an adapter and is cut into {[view.name for view in views]}"
    assert tensor.packed is None, f"{tensor.name} is in NF4 and is cut into {[view.name for view in views]}"
    return [replace(tensor, name=view.name, packed=view) for view in views]


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of `module.state_dict()`, such as the bias of DeepSeek-V3's router."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def adapter_tensors(module: nn.Module) -> list[NamedTensor]:
    """The trainable tensors (adapters, and a value head if present) under the names of PEFT's adapter files."""
    return [
        NamedTensor(name=PEFT_PREFIX + without_adapter(name), parameter=parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def adapter_settings(module: nn.Module) -> dict[str, Any]:
    """Content of adapter_config.json, as PEFT and vLLM read it."""
    settings = cast("Any", module).peft_config[ADAPTER_NAME].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    return cast("dict[str, Any]", json.loads(json.dumps(plain)))
