"""Forward passes that compute the bits of the servers: `EngineConfig.match_servers`.

The caller gives the servers' operations (`Operations`). Sums of residuals stay those of transformers, which the servers
compute in turn. The operations have no gradients: theirs are those of the usual operations at the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from plinth_base.model_folder import MATCHED

from ..errors import ModelError
from .experts import experts_of, grouped_experts, use_experts
from .flash4 import flash4_gradients
from .parts import linear_layers, with_globals

if TYPE_CHECKING:
    from ..batch import LogProbFn
    from .attention import PackedLayout


class Operations(Protocol):
    """Operations whose rows do not depend on the rows beside them (rollout_vllm/servers/exact/operations.py)."""

    @property
    def linear(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """(x [..., K], weight [N, K], bias [N] or None) -> [..., N]."""

    @property
    def rms_norm(self) -> Callable[[Tensor, Tensor, float], Tensor]:
        """(x [..., H], weight [H], eps) -> [..., H]."""

    @property
    def silu_and_mul(self) -> Callable[[Tensor, Tensor], Tensor]:
        """(gate, up) -> gate * sigmoid(gate), rounded, times up; all [..., I]."""

    @property
    def rotate(self) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
        """(x [T, heads, d], `rotary_table`, positions [T], inverse) -> [T, heads, d], turned (back: the gradient)."""

    @property
    def rotary_table(self) -> Callable[[Tensor, int, torch.dtype], Tensor]:
        """(frequencies [F] fp32, number of positions, dtype) -> [positions, 2, 2 F], cosines and sines."""

    @property
    def attention(self) -> Callable[..., Tensor]:
        """(q [T, heads, d], k and v [blocks, key heads, B, d], block table [S, most blocks], first query of each
        sequence [S + 1], lengths [S], scale, most queries of a sequence) -> [T, heads, d]; on a GPU `lse` [heads, T]
        takes the log-sum-exps."""

    @property
    def route(self) -> Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]:
        """(logits [T, E], experts of a token K, normalize) -> weights with their gradients and experts, [T, K] each."""

    @property
    def grouped_linear(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """(rows [S, K] sorted by expert, weight [E, N, K], ends of the experts' rows [E]) -> [S, N]."""

    @property
    def collect(self) -> Callable[[Tensor, Tensor], Tensor]:
        """(rows [S, N], places of each token's rows [T, K]) -> their sums [T, N]."""

    @property
    def scores(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(logits [N, V], tokens [N]) -> fp32 log-probs of the tokens and entropies, [N] each."""


_HEAD_DIMS = (8, 16, 32, 64, 128, 256)
"""Powers of two, as Triton's tiles are."""
_LOGIT_ROWS = 2048
"""Targets whose logits are in memory at once."""


def check_match(model_config: Any) -> None:
    """Raises ModelError for an architecture whose servers compute something else."""
    rope = getattr(model_config, "rope_parameters", None) or {}
    for name, value, allowed in (
        ("model_type", getattr(model_config, "model_type", None), MATCHED["model_type"]),
        ("hidden_act", getattr(model_config, "hidden_act", None), ("silu",)),
        ("rope_type", rope.get("rope_type", "default"), MATCHED["rope_type"]),
        ("head_dim", getattr(model_config, "head_dim", None) or _head_dim(model_config), _HEAD_DIMS),
        ("use_sliding_window", bool(getattr(model_config, "use_sliding_window", False)), (False,)),
    ):
        if value not in allowed:
            raise ModelError(
                f"its {name} is {value!r}, which match_servers does not have",
                field="match_servers",
                value=True,
                allowed=f"{name} {' or '.join(map(str, allowed))}",
            )


def _head_dim(model_config: Any) -> int:
    return int(model_config.hidden_size) // int(model_config.num_attention_heads)


def match_servers(model: Any, operations: Operations) -> None:
    """Make the layers of the backbone compute with `operations`, in place.

    Raises:
        ModelError: see `check_match`.
        EngineConfigError: torch has no grouped products of the model's experts, which compute their gradients.
    """
    check_match(model.config)
    if experts := experts_of(model):
        use_experts(model, "grouped", device=experts[0].down_proj.device)
    for layer in linear_layers(model, nn.Linear).values():
        layer.forward = partial(_linear, layer, operations)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, operations)
        elif hasattr(module, "inv_freq"):
            module.forward = _rotary_forward(module, operations)
        elif type(module).__name__.endswith("Router"):
            module.forward = partial(_router, module, operations)
        elif module in experts:
            module.forward = _experts_forward(module, operations)
        elif hasattr(module, "act_fn"):
            module.forward = partial(_mlp, module, operations)
        elif hasattr(module, "q_proj"):
            module.forward = with_globals(module, apply_rotary_pos_emb=partial(_rotate_both, operations))


class _Linear(torch.autograd.Function):
    """Saves the inputs themselves, so a weight may be partitioned between forward and backward (ZeRO-3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operations: Operations) -> Tensor:
        ctx.save_for_backward(x, weight)
        return operations.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = None, None, None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = rows.T @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


class _Recomputed(torch.autograd.Function):
    """`exact(*inputs)` forward; backward the gradients of `usual(*inputs)`, which rounds in another order."""

    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Any], usual: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.usual = usual
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.usual(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [x for x in inputs if x.requires_grad]
        gradients = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return (None, None, *(next(gradients) if x.requires_grad else None for x in inputs))


class _Attention(torch.autograd.Function):
    """Keeps the output and the log-sum-exps, which are all that gradients need of a forward pass."""

    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], gradients: Callable[..., Any], *inputs: Tensor) -> Tensor:
        q, ctx.gradients = inputs[0], gradients
        lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
        out = exact(*inputs, lse=lse)
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradients(grad, *ctx.saved_tensors)


def _linear(layer: Any, operations: Operations, x: Tensor) -> Tensor:
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias, operations)
    return out


def norm_gradients(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight` of weight * round(x / sqrt(mean(x^2) + eps)); x and grad: [..., H]."""
    if x.is_cuda:
        from .matching_kernels import norm_gradients as kernel

        return kernel(x, weight, grad, eps)
    wide, wide_grad = _wide(x), _wide(grad)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed, weighted = wide * scale, wide_grad * weight
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    grad_weight = (wide_grad * normed.to(x.dtype)).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def silu_and_mul_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up` of silu(gate) * up; all [..., I]."""
    if gate.is_cuda:
        from .matching_kernels import silu_and_mul_gradients as kernel

        return kernel(gate, up, grad)
    wide, wide_grad = _wide(gate), _wide(grad)
    sigmoid = torch.sigmoid(wide)
    grad_gate = wide_grad * up * sigmoid * (1 + wide * (1 - sigmoid))
    return grad_gate.to(gate.dtype), (wide_grad * wide * sigmoid).to(up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Exact(torch.autograd.Function):
    """`exact(*inputs)` forward; backward `gradients(*inputs, grad)`."""

    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], gradients: Callable[..., Any], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradients(*ctx.saved_tensors, grad)


def _norm(module: Any, operations: Operations, x: Tensor) -> Tensor:
    eps = float(module.variance_epsilon)
    gradients = partial(norm_gradients, eps=eps)
    out: Tensor = _Exact.apply(lambda x, weight: operations.rms_norm(x, weight, eps), gradients, x, module.weight)
    return out


def _rotary_forward(module: Any, operations: Operations) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(table, positions [T]) in place of cosines and sines of all tokens."""
    table: Tensor | None = None

    @torch.no_grad()
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal table
        if table is None or (table.dtype, table.device) != (x.dtype, x.device):
            frequencies = module.inv_freq.to(device=x.device, dtype=torch.float32)
            table = operations.rotary_table(frequencies, module.config.max_position_embeddings, x.dtype)
        return table, position_ids.flatten()

    return forward


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, positions: Tensor, operations: Operations) -> Tensor:
        ctx.table, ctx.positions, ctx.rotate = table, positions, operations.rotate
        return operations.rotate(x, table, positions, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rotate(grad, ctx.table, ctx.positions, True), None, None, None


def _rotate_both(
    operations: Operations, q: Tensor, k: Tensor, table: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of the layers; q and k: [1, heads, T, d]."""
    # `squeeze` is a view also of gradients, which `x[0]` copies.
    rows = (_Rotated.apply(x.squeeze(0).transpose(0, 1), table, positions, operations) for x in (q, k))
    q, k = (x.transpose(0, 1).unsqueeze(0) for x in rows)
    return q, k


def _silu_and_mul(operations: Operations, gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _Exact.apply(operations.silu_and_mul, silu_and_mul_gradients, gate, up)
    return out


def _mlp(module: Any, operations: Operations, x: Tensor) -> Tensor:
    out: Tensor = module.down_proj(_silu_and_mul(operations, module.gate_proj(x), module.up_proj(x)))
    return out


def _router(module: Any, operations: Operations, x: Tensor) -> tuple[Tensor, ...]:
    logits = _Linear.apply(x.reshape(-1, x.shape[-1]), module.weight, None, operations)
    return logits, *operations.route(logits, module.top_k, module.norm_topk_prob)


def _experts_forward(module: Any, operations: Operations) -> Callable[..., Tensor]:
    def product(rows: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
        return operations.grouped_linear(rows, weight, ends)

    def gate(products: Tensor) -> Tensor:
        return _silu_and_mul(operations, *products.chunk(2, dim=-1))

    return partial(grouped_experts, module, product=product, gate=gate, collect=operations.collect)


def matching_log_probs(log_prob_fn: LogProbFn, operations: Operations) -> LogProbFn:
    """A function of the servers' log-probs, from logits in the model's dtype, and of entropies, both fp32 [N]; their
    gradients are those of `log_prob_fn`."""

    def compute(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, **options: Any) -> Any:
        def usual(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return log_prob_fn(hidden, weight, targets_N, temperature, **options)

        def exact(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            chosen, entropies = list[Tensor](), list[Tensor]()
            for rows, ids in zip(hidden.split(_LOGIT_ROWS), targets_N.split(_LOGIT_ROWS), strict=True):
                logits = operations.linear(rows, weight, options.get("bias"))
                logits = logits if temperature == 1.0 else logits.float() / temperature
                for results, result in zip((chosen, entropies), operations.scores(logits, ids), strict=True):
                    results.append(result)
            return torch.cat(chosen), torch.cat(entropies)

        return _Recomputed.apply(exact, usual, hidden_NH, weight_VH)

    return compute


@dataclass(frozen=True, kw_only=True)
class MatchedAttention:
    """Layout of the keys of a packed row as a paged cache with one token a block, and the operation."""

    operations: Operations
    packing: PackedLayout
    table: Tensor
    """[S, longest] int32, the rows of the keys of each sequence or node in order."""
    lengths: Tensor

    @classmethod
    def make(cls, packing: PackedLayout, operations: Operations) -> MatchedAttention:
        """The layout and the operation for one packed row or tree."""
        keys, tree = packing.keys, packing.tree
        table = keys.cu_seqlens[:-1, None] + torch.arange(keys.longest, device=keys.cu_seqlens.device)
        if tree is not None and packing.kernel == "flash4":  # keys of a path are read in place, not gathered
            table = tree.path_rows[table.clamp(max=len(tree.path_rows) - 1)]
        return cls(operations=operations, packing=packing, table=table.to(torch.int32), lengths=keys.cu_seqlens.diff())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, usual: Callable[..., Tensor]) -> Tensor:
        """q: [T, heads, d], k and v: [rows, key heads, d]; `usual`: another kernel's attention, for the gradients."""
        borders, crossings = self.packing.borders, self.packing.crossings

        def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            layout = (self.table, borders.cu_seqlens, self.lengths)
            return self.operations.attention(
                q, k[:, :, None], v[:, :, None], *layout, scale, borders.longest, **options
            )

        if self.packing.kernel == "flash4" and crossings is not None:
            gradients = partial(flash4_gradients, borders=borders, crossings=crossings, scale=scale)
            out: Tensor = _Attention.apply(exact, gradients, q, k, v)
        else:
            out = _Recomputed.apply(exact, usual, q, k, v)
        return out
