"""Experts of a mixture in grouped matrix products, in place of transformers' loop over the experts.

    out_t = sum_k w_tk down_e(act(gate_e x_t) * up_e x_t),   e = index_tk

Rows are sorted by expert, so that one product computes all experts, also those without tokens; nothing waits for the
device. The backward pass gathers the rows of its inputs again, and takes weights from the parameters themselves: views
of gathered weights would keep each layer's experts in memory at stage 3.

Shapes: T tokens, K experts a token, S = T * K rows, E experts, H hidden and I intermediate width, N either of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import EngineConfigError
from ..upstream import FENCE

if TYPE_CHECKING:
    from ..config import Experts

Product = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(rows [S, N] sorted by expert, weight [E, ...], ends [E], is_transposed) -> rows of each expert times its weight."""
Collect = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, N], places [T, K]) -> sums [T, N]."""
EXPERTS_NAME = "ds_engine"
"""Name under which transformers knows the implementation of this module."""
_ALIGNMENT = 16
"""Bytes; torch refuses grouped products of matrices whose rows have other lengths."""
EXPERTS = FENCE.patch(
    name="grouped products of experts",
    reason="transformers' own keep each row once more, and at stage 3 the weights of all layers",
    otherwise="stock path",
    reads={
        "transformers.integrations.moe": ("ALL_EXPERTS_FUNCTIONS", "_default_apply_gate(gate_up_out)"),
        "transformers.models.mixtral.modeling_mixtral:MixtralExperts": ("_apply_gate(gate_up_out)",),
        "transformers:PreTrainedModel": ("set_experts_implementation(experts_implementation)",),
        "transformers:PreTrainedConfig": ("_experts_implementation",),
        "torch.nn.functional": ("grouped_mm",),
    },
)


def use_experts(model: Any, setting: Experts, *, device: torch.device) -> None:
    """Set how the experts of a transformers model are computed on `device`; a model without experts is unchanged.

    Raises:
        EngineConfigError: `setting` is "grouped", and this model or device has no grouped products.
    """
    if not EXPERTS.check():
        return
    reason = _why_not_grouped(model, device)
    if setting == "grouped" and reason:
        raise EngineConfigError(reason, field="experts", value=setting, allowed="auto or loop")
    if experts_of(model):
        _register(EXPERTS_NAME, grouped_experts)
        model.set_experts_implementation("eager" if setting == "loop" or reason else EXPERTS_NAME)


def keep_out_of_graphs(model: Any) -> None:
    """Exclude grouped products from graphs of torch.compile, which takes them in bfloat16 only."""
    layers = experts_of(model)
    is_grouped = bool(layers) and model.config._experts_implementation == EXPERTS_NAME
    if is_grouped and any(weight.dtype != torch.bfloat16 for layer in layers for weight in layer.parameters()):
        # Under a name of its own: the next model of this process registers the other one again.
        name = f"{EXPERTS_NAME}_out_of_graphs"
        _register(name, torch.compiler.disable(grouped_experts))
        model.set_experts_implementation(name)


def _register(name: str, function: Callable[..., Tensor]) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, function)


def experts_of(model: nn.Module) -> list[Any]:
    """The modules of `model` that hold the experts of a layer as 3D parameters and let transformers compute them."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def _why_not_grouped(model: nn.Module, device: torch.device) -> str:
    """The reason for which torch has no grouped products of these experts; empty if it has."""
    layers = experts_of(model)
    if not layers:
        return f"{type(model).__name__} has no experts that transformers can compute in several ways"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's grouped products need a GPU of compute capability 8.0"
    for layer in layers:
        for name, weight in layer.named_parameters():
            shape = getattr(weight, "ds_shape", weight.shape)
            if len(shape) == 3 and any(width * weight.element_size() % _ALIGNMENT for width in shape[1:]):
                return f"{name} of {type(layer).__name__} has rows that are no multiple of {_ALIGNMENT} bytes"
    return ""


def _product(rows_SN: Tensor, weight_E: Tensor, ends_E: Tensor, is_transposed: bool) -> Tensor:
    """Rows of each expert times its weight, [E, out, in], or [E, in, out] if transposed."""
    weight = weight_E if is_transposed else weight_E.transpose(-2, -1)
    return nn.functional.grouped_mm(rows_SN, weight, offs=ends_E)


def _weight_gradient(in_SN: Tensor, grad_SN: Tensor, ends_E: Tensor, is_transposed: bool) -> Tensor:
    left, right = (in_SN, grad_SN) if is_transposed else (grad_SN, in_SN)
    return nn.functional.grouped_mm(left.T, right, offs=ends_E)


def _collect(rows_SN: Tensor, place_TK: Tensor) -> Tensor:
    """The sum of each token's K rows, [T, N]."""
    return rows_SN[place_TK.flatten()].view(*place_TK.shape, -1).sum(1)


def grouped_experts(
    experts: Any,
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    product: Product = _product,
    gate: Callable[[Tensor], Tensor] | None = None,
    collect: Collect = _collect,
) -> Tensor:
    """The forward pass of transformers' experts modules; `experts` has their parameters.

    Args:
        product: computes rows of each expert in the forward pass.
        gate: the activation of gate and up projection; None: the module's own.
        collect: adds up each token's rows in the forward pass.
    """
    num_tokens, per_token = index_TK.shape
    expert_S, slot_S = index_TK.flatten().sort()
    token_S = slot_S // per_token
    place_TK = torch.empty_like(slot_S).scatter_(0, slot_S, torch.arange(len(slot_S), device=slot_S.device))
    place_TK = place_TK.view(num_tokens, per_token)
    numbers_E = torch.arange(experts.num_experts, device=slot_S.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
    names = ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"
    up, down = (getattr(experts, name) for name in names)
    products = _Up.apply(hidden_TH, up, token_S, place_TK, ends_E, experts.is_transposed, product)
    if experts.has_bias:
        products = products + getattr(experts, f"{names[0]}_bias")[expert_S]
    gate = gate or (experts._apply_gate if experts.has_gate else experts.act_fn)
    inner_SI = gate(products)
    # Routing weights scale the narrow rows before the product, not the wide ones after it.
    weights_S1 = _Rows.apply(weights_TK.reshape(-1, 1), slot_S, place_TK.view(-1, 1))
    scaled_SI = (inner_SI * weights_S1).to(down.dtype)
    out_TH: Tensor = _Down.apply(
        scaled_SI, down, token_S, place_TK, ends_E, experts.is_transposed, lambda *x: collect(product(*x), place_TK)
    )
    if experts.has_bias:
        zeros_TE = weights_TK.new_zeros(num_tokens, experts.num_experts)
        out_TH = out_TH + zeros_TE.scatter(1, index_TK, weights_TK).to(down.dtype) @ experts.down_proj_bias
    return out_TH.to(hidden_TH.dtype)


class _Rows(torch.autograd.Function):
    """Row `source_S` of the input; in the backward pass, sums in a fixed order instead of atomic additions."""

    @staticmethod
    def forward(ctx: Any, in_TN: Tensor, source_S: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return in_TN[source_S]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (place_TK,) = ctx.saved_tensors
        return _collect(gradients[0], place_TK), None, None


class _Up(torch.autograd.Function):
    """Products of each token with its K experts, sorted by expert, [S, N]."""

    @staticmethod
    def forward(
        ctx: Any, in_TH: Tensor, weight_E: Tensor, token_S: Tensor, place_TK: Tensor, ends_E: Tensor, transposed: bool,
        product: Product,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(in_TH, weight_E, token_S, place_TK, ends_E)
        ctx.transposed = transposed
        return product(in_TH[token_S].to(weight_E.dtype), weight_E, ends_E, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        in_TH, weight_E, token_S, place_TK, ends_E = ctx.saved_tensors
        grad_SN = gradients[0].contiguous()
        grad_TH = grad_E = None
        if ctx.needs_input_grad[0]:
            grad_TH = _collect(_product(grad_SN, weight_E, ends_E, not ctx.transposed), place_TK).to(in_TH.dtype)
        if ctx.needs_input_grad[1]:
            grad_E = _weight_gradient(in_TH[token_S].to(weight_E.dtype), grad_SN, ends_E, ctx.transposed)
        return grad_TH, grad_E, None, None, None, None, None


class _Down(torch.autograd.Function):
    """Products of the rows with their experts, added up for each token, [T, H]."""

    @staticmethod
    def forward(
        ctx: Any, in_SI: Tensor, weight_E: Tensor, token_S: Tensor, place_TK: Tensor, ends_E: Tensor, transposed: bool,
        product: Product,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(in_SI, weight_E, token_S, ends_E)
        ctx.transposed = transposed
        return product(in_SI, weight_E, ends_E, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        in_SI, weight_E, token_S, ends_E = ctx.saved_tensors
        grad_SH = gradients[0][token_S]
        grad_SI = grad_E = None
        if ctx.needs_input_grad[0]:
            grad_SI = _product(grad_SH, weight_E, ends_E, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            grad_E = _weight_gradient(in_SI, grad_SH, ends_E, ctx.transposed)
        return grad_SI, grad_E, None, None, None, None, None
