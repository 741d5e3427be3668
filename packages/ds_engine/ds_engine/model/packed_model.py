"""Packed forward of a Hugging Face model: log-probs or values of K targets instead of logits of every token.

The module and its parameter names stay the same. `install_packed_forward` adds a second way to call it,
`model(packed=PackedInputs(...), temperature=...)`: run the backbone, select the hidden states that predict a target and
call the head. The LM head runs the injected log-prob function and returns [2, K], log-probs and entropies, or at
temperature 0 the most likely tokens as [1, K]; with a `HeadTerm` it returns [3, K]. The value head returns [1, K]. The
computation runs inside the head's own forward because ZeRO-3 gathers its weight there, also when it is tied to the
embedding. `head_term=HIDDEN` leaves the head out and returns the selected hidden states, [H, K].

An architecture that is not exact on a packed row (see trial.py) computes `PaddedRows` instead, with upstream's own
attention and recurrence: one call of the backbone per micro batch, so that ranks issue the same collectives at stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BatchError, ModelError
from ..upstream import text_part
from .attention import PackedLayout, packed_layout
from .matching import MatchedAttention, Operations, matching_log_probs
from .parts import VALUE_HEAD, find_backbone, transformer_layers
from .prefix_tree import check_order, gather_rows, take
from .recurrence import recurrence_per_sequence
from .rotary import rotary_per_sequence
from .router_replay import given_routes
from .sequence_parallel import SequenceGroup, TargetShare, gather_outputs, share_targets
from .vision import SeenImages, Vision, install_vision

if TYPE_CHECKING:
    from ..batch import HeadTerm, LogProbFn, Prefixes, TokenBatch


HIDDEN = "hidden"
"""In place of a head term: the hidden states that predict the targets, without the head."""

ROWS = "rows"
"""In place of an attention kernel: upstream's own forward of one padded row per sequence."""


@dataclass(frozen=True, kw_only=True)
class PaddedRows:
    """The sequences of a micro batch as S rows, padded with zeros on the right to the longest one's L tokens."""

    input_ids_SL: Tensor
    mask_SL: Tensor
    """int64; 0 at padding."""


@dataclass(frozen=True, kw_only=True)
class PackedInputs:
    """Input of the packed forward: one micro batch on the device. Never empty, see `packed_inputs`."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    """[1, T], with images in a model with three axes of positions [3, 1, T]."""
    packing: PackedLayout
    target_index_K: Tensor
    target_ids_K: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of the batch for a head term; of this rank's targets with sequence parallelism."""
    rows: PaddedRows | None = None
    """Set with kernel `ROWS`: `target_index_K` then counts the S * L tokens of the rows."""
    share: TargetShare | None = None
    """Set with sequence parallelism: T and K are then this rank's part, and `share` says how to gather all outputs."""
    rows_T: Tensor
    """int64, on the CPU: the row of each of the batch's tokens among those that are computed. With sequence parallelism
    counted from this rank's first one; those of other ranks are outside of its rows."""
    routes_PLk: Tensor | None = None
    """Routes to replay (`given_routes`)."""
    seen: SeenImages | None = None
    """Images; with sequence parallelism `features_T` are those of this rank's tokens."""
    entropy: EntropyUse = field(default_factory=lambda: EntropyUse())


class EntropyUse:
    """Use of a forward pass's entropies by its loss: the head's backward pass leaves out those that are not used.

    The entropies are a row of the head's one output, whose gradient is zeros where the loss does not use them. That is
    known, without reading these zeros, when the backward pass gets to the head.
    """

    is_possible = True

    def watch(self, entropy_K: Tensor) -> Tensor:
        """`entropy_K`, which the loss gets; without a call of this all entropies are taken as used."""
        if entropy_K.requires_grad:
            self.is_possible = False
            entropy_K.register_hook(self._mark)
        return entropy_K

    def _mark(self, grad_K: Tensor) -> None:
        self.is_possible = True


class _StackRows(torch.autograd.Function):
    """`torch.stack`; entropies that the loss does not use, row 1, have no gradient in place of zeros."""

    @staticmethod
    def forward(ctx: Any, entropy: EntropyUse, *rows_K: Tensor) -> Tensor:
        ctx.entropy = entropy
        return torch.stack(rows_K)

    @staticmethod
    def backward(ctx: Any, grad_RK: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad_K if row != 1 or ctx.entropy.is_possible else None for row, grad_K in enumerate(grad_RK)]
        return None, *grads


def mark_way(model: nn.Module, *, rows: bool, shares_prefixes: bool, sees_images: bool = False) -> None:
    """Record on `model` that it computes padded rows, and whether it is exact where sequences share prefixes and with
    images."""
    model.computes_padded_rows = rows  # type: ignore[assignment]
    model.shares_prefixes = shares_prefixes  # type: ignore[assignment]
    model.sees_images = sees_images  # type: ignore[assignment]


def vision_of(model: nn.Module, *, always: bool) -> Vision | None:
    """Reads the images of batches if `model` was tried with images and is exact (see `Vision.always`)."""
    return Vision.of(model, always=always) if getattr(model, "sees_images", False) is True else None


def row_kernel(model: nn.Module) -> str | None:
    """`ROWS` if `model` computes padded rows; None if it has packed attention."""
    return ROWS if getattr(model, "computes_padded_rows", False) else None


def shares_prefixes(model: nn.Module) -> bool:
    """True if `model` was tried with shared prefixes and is exact."""
    return getattr(model, "shares_prefixes", False) is True


def packed_inputs(
    batch: TokenBatch,
    *,
    device: torch.device,
    kernel: str,
    sp_group: SequenceGroup | None = None,
    prefixes: Prefixes | None = None,
    keeps_paths: bool = False,
    with_columns: bool = False,
    routes_TLk: Tensor | None = None,
    vision: Vision | None = None,
) -> tuple[PackedInputs, int]:
    """Build the model's inputs for `batch` and count its targets; with `sp_group`, inputs are this rank's slice.

    A batch without targets becomes one token that predicts one token: the cheapest forward that runs every module and
    so takes part in every collective. The caller must multiply its output by zero. `with_columns` is for a head term.

    Args:
        prefixes: the shared prefixes of the sequences, which are computed once; not with kernel `ROWS`.
        keeps_paths: see `packed_layout`.
        routes_TLk: experts of each token in each layer, to replay (router_replay.py).
        vision: reads the batch's images; where there are some, `prefixes` are not used.

    Raises:
        BatchError: `cu_seqlens_S1` does not describe the tokens of `input_ids_T`, `prefixes` no tree of them, or, with
            kernel `ROWS`, the positions of a sequence do not count its tokens from 0. Images that the model cannot see,
            or that do not belong to the tokens.
    """
    images = tuple(getattr(batch, "images", ()))
    if vision is None and any(image is not None for image in images):
        raise BatchError("this model is not trained with images", field="images", value=len(images), allowed="none")
    seen = None
    num_targets = batch.target_ids_K.numel()
    if num_targets == 0:
        zero = torch.zeros(1, dtype=torch.int64)
        ids, positions, lengths, index, targets = zero, zero, [1], zero, zero
    else:
        ids, positions, lengths = batch.input_ids_T, batch.position_ids_T, batch.cu_seqlens_S1.diff().tolist()
        index, targets = batch.target_index_K, batch.target_ids_K
        if sum(lengths) != ids.numel() or any(n < 1 for n in lengths):
            raise BatchError(
                f"it describes sequences of {lengths[:8]} tokens, but input_ids_T has {ids.numel()}",
                field="cu_seqlens_S1",
                allowed="positive lengths that add up",
            )
    if vision is not None:
        sampled = index[targets == vision.placeholder] + 1
        seen = vision.see(images if num_targets else (), ids, positions, lengths, sampled)
    if seen is not None:
        prefixes = None
        positions = positions if seen.positions_AT is None else seen.positions_AT
    columns = dict(batch.columns) if with_columns else {}
    share = rows = parents = None
    rows_T = torch.from_numpy(np.arange(len(ids)))  # torch's takes milliseconds to divide the work among busy cores
    last_T = torch.tensor(lengths).cumsum(0) - 1
    if prefixes is not None and num_targets:
        ids, positions, lengths, index = _computed(prefixes, ids, positions, index)
        parents, rows_T = list(prefixes.parents_N), prefixes.place_T.cpu()
    if kernel == ROWS:
        rows, rows_T = _padded_rows(ids, positions, lengths, device)
        index = rows_T[index]
    tokens, missing = slice(None), 0
    if sp_group is not None:
        missing = -len(ids) % sp_group.size
        ids, positions, lengths = _pad(ids, positions, lengths, missing)
        if parents is not None:
            parents += [-1] * (len(lengths) - len(parents))
        part = len(ids) // sp_group.size
        start = sp_group.rank * part
        tokens = slice(start, start + part)
        ids, positions, rows_T = ids[tokens], positions[..., tokens], rows_T - start
        share = share_targets(index, tokens_per_rank=part, sequence_rank=sp_group.rank, sp=sp_group.size)
        # A rank without targets computes one dummy target, so that it runs the head and its collectives too.
        own = share.own_k if len(share.own_k) else share.own_k.new_zeros(1)
        index, targets = (index[own] - start).clamp(0, part - 1), targets[own]
        columns = {name: column[own] for name, column in columns.items()} if num_targets else columns
        share = replace(share, source_K=share.source_K.to(device))
    routes_PLk = None
    if routes_TLk is not None and num_targets:
        num_rows = len(ids) if rows is None else rows.mask_SL.numel()
        routes_PLk = given_routes(routes_TLk, last_T, rows_T, num_rows).to(device)
    seen = None if seen is None else seen.pick(tokens, missing, device)
    packing = packed_layout(
        lengths,
        device=device,
        kernel=kernel,
        sp_group=sp_group,
        parents=parents,
        keeps_paths=keeps_paths,
        blocks_T=None if seen is None else seen.blocks_T,
    )
    return PackedInputs(
        input_ids_1T=ids.to(device).unsqueeze(0),
        position_ids_1T=positions.to(device).unsqueeze(-2),
        packing=packing,
        target_index_K=index.to(device),
        target_ids_K=targets.to(device),
        columns={name: column.to(device) for name, column in columns.items()},
        rows=rows,
        share=share,
        rows_T=rows_T,
        routes_PLk=routes_PLk,
        seen=seen,
    ), num_targets


def _computed(
    prefixes: Prefixes, ids_T: Tensor, positions_T: Tensor, index_K: Tensor
) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """(ids, positions, lengths of the nodes, target indices) of the computed tokens."""
    lengths = prefixes.cu_seqlens_N1.diff().tolist()
    rows_U, place_T = prefixes.computed_U, prefixes.place_T
    if sum(lengths) != len(rows_U) or min(lengths) < 1 or len(lengths) != len(prefixes.parents_N):
        raise BatchError("nodes, their borders and their tokens differ", field="prefixes", value=lengths[:8])
    check_order(prefixes.parents_N)
    ids_U = take(ids_T, rows_U)
    if len(place_T) != len(ids_T) or not np.array_equal(take(ids_U, place_T).cpu(), ids_T.cpu()):
        raise BatchError("its computed tokens are not those of the batch", field="prefixes.place_T")
    return ids_U, take(positions_T, rows_U), lengths, take(place_T, index_K)


def _padded_rows(
    ids_T: Tensor, positions_T: Tensor, lengths: list[int], device: torch.device
) -> tuple[PaddedRows, Tensor]:
    """The rows, and the places of the T tokens among their flattened ones."""
    if positions_T.tolist() != [position for n in lengths for position in range(n)]:
        problem = "this model numbers tokens itself"
        raise BatchError(problem, field="position_ids_T", allowed="the tokens of each sequence counted from 0")
    ids_SL = nn.utils.rnn.pad_sequence(ids_T.split(lengths), batch_first=True)
    mask_SL = nn.utils.rnn.pad_sequence([ids_T.new_ones(n) for n in lengths], batch_first=True)
    place_T = mask_SL.flatten().nonzero()[:, 0]
    return PaddedRows(input_ids_SL=ids_SL.to(device), mask_SL=mask_SL.to(device)), place_T


def _pad(ids_T: Tensor, positions_T: Tensor, lengths: list[int], missing: int) -> tuple[Tensor, Tensor, list[int]]:
    """Pad T with one more sequence of `missing` zeros at the end, which no target uses."""
    if missing == 0:
        return ids_T, positions_T, lengths
    pad = nn.functional.pad
    return pad(ids_T, (0, missing)), pad(positions_T, (0, missing)), [*lengths, missing]


def install_packed_forward(
    model: Any, log_prob_fn: LogProbFn | None, *, count_calls: bool = True, operations: Operations | None = None
) -> None:
    """Add the packed forward to `model`, in place. Calls without `packed` work as before.

    The first packed row is refused with a ModelError unless each layer calls packed attention, or a recurrence that
    knows the borders: another token mixer does not.

    Args:
        model: a transformers causal LM; if `log_prob_fn` is None, a model with a value head (`VALUE_HEAD`).
        count_calls: False for compiled layers, whose graphs the count would be a part of.
        operations: those of the servers, for attention and log-probs (matching.py).

    Raises:
        ModelError: the model has no separate backbone, or its head is missing or not supported.
    """
    if log_prob_fn is None:
        head = getattr(model, VALUE_HEAD, None)
    else:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    _, backbone = find_backbone(model)
    if not isinstance(head, nn.Module) or backbone is None:
        kind = "value model with a backbone and a value head" if log_prob_fn is None else "causal language model"
        raise ModelError(f"{type(model).__name__} is not a {kind} whose parts can be called separately")
    hidden_scale = 1.0
    if log_prob_fn is None:
        _install_value_forward(head)
    else:
        hidden_scale = _hidden_scale(model)
        if operations is not None:
            log_prob_fn = matching_log_probs(log_prob_fn, operations)
        _install_lm_forward(head, log_prob_fn, _head_options(model, head))
    original: Callable[..., Any] = model.forward
    set_rotary_layout = rotary_per_sequence(backbone)
    set_recurrent_layout = recurrence_per_sequence(backbone, compiled=not count_calls)
    if text_part(backbone) is not backbone:
        install_vision(backbone)
    uncounted = count_calls

    def hidden_states(packed: PackedInputs) -> Tensor:
        """Hidden states of all tokens, packed [T, H] or of the rows [S * L, H]."""
        nonlocal uncounted
        set_rotary_layout(packed.packing)
        if packed.rows is not None:
            set_recurrent_layout(None)
            out = backbone(input_ids=packed.rows.input_ids_SL, attention_mask=packed.rows.mask_SL, use_cache=False)
            return cast("Tensor", out[0]).flatten(0, 1)
        packing = replace(packed.packing, calls=[]) if uncounted else packed.packing
        if operations is not None:
            packing = replace(packing, matched=MatchedAttention.make(packing, operations))
        set_recurrent_layout(packing)
        seen = {} if packed.seen is None else {"seen": packed.seen}
        with _checked_calls(model, text_part(backbone), packing) if uncounted else nullcontext():
            out = backbone(
                input_ids=packed.input_ids_1T,
                position_ids=packed.position_ids_1T,
                use_cache=False,
                packing=packing,
                **seen,
            )
        uncounted = False
        return cast("Tensor", out[0][0])

    def forward(
        *args: Any,
        packed: PackedInputs | None = None,
        temperature: float = 1.0,
        head_term: HeadTerm | str | None = None,
        **kwargs: Any,
    ) -> Any:
        if packed is None:
            set_recurrent_layout(None)
            return original(*args, **kwargs)
        hidden_TH = hidden_states(packed)
        if packed.packing.tree is None:
            hidden_KH = hidden_TH.index_select(0, packed.target_index_K)
        else:  # the last token of a shared prefix predicts several targets
            hidden_KH = gather_rows(hidden_TH, packed.target_index_K)
        if hidden_scale != 1.0:
            hidden_KH = hidden_KH * hidden_scale
        if head_term == HIDDEN:
            rows_RK = hidden_KH.T
        else:
            term: dict[str, Any] = {} if head_term is None else {"head_term": head_term, "columns": packed.columns}
            if log_prob_fn is not None:
                term["entropy"] = packed.entropy
            rows_RK = head(hidden_KH, targets_K=packed.target_ids_K, temperature=temperature, **term)
        if packed.share is not None and packed.packing.sp_group is not None:
            rows_RK = gather_outputs(rows_RK, packed.share, packed.packing.sp_group)
        return rows_RK

    model.forward = forward


_TOKENWISE = ("mlp", "moe")
"""Nemotron-H's names of layers without a token mixer."""


@contextmanager
def _checked_calls(model: Any, text: nn.Module, packing: PackedLayout) -> Iterator[None]:
    """Raise ModelError after a forward unless each transformer layer that ran called packed attention."""
    ran: list[nn.Module] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, _: ran.append(module)) for layer in transformer_layers(text)
    ]
    yield
    for hook in hooks:
        hook.remove()
    calls = packing.calls or []
    for layer in ran:
        if getattr(layer, "block_type", None) in _TOKENWISE:
            continue
        if not any(id(module) in calls for module in layer.modules()):
            parts = ", ".join(dict.fromkeys(type(child).__name__ for child in layer.children()))
            raise ModelError(
                f"this layer of {type(model).__name__} ({parts}) does not call packed attention, so it mixes tokens "
                "without the borders of the sequences",
                field=type(layer).__name__,
            )
    if not calls:
        raise ModelError(f"{type(model).__name__} does not call packed attention")


def _install_lm_forward(head: Any, log_prob_fn: LogProbFn, options: dict[str, Any]) -> None:
    original: Callable[..., Any] = head.forward
    has_bias = getattr(head, "bias", None) is not None

    def forward(
        hidden: Tensor,
        *,
        targets_K: Tensor | None = None,
        temperature: float = 1.0,
        head_term: HeadTerm | None = None,
        columns: Mapping[str, Tensor] | None = None,
        entropy: EntropyUse | None = None,
    ) -> Any:
        if targets_K is None:
            return original(hidden)
        if temperature == 0.0:
            return _most_likely(head, hidden)
        extra = dict(options, bias=head.bias) if has_bias else options
        hidden = hidden.to(head.weight.dtype)  # residuals of Mamba are fp32 beside bf16 weights
        log_probs_K, entropy_K = log_prob_fn(hidden, head.weight, targets_K, temperature, **extra)
        # One tensor, not two: ZeRO-3 hooks each output tensor of a module. A loss that uses the entropy on only one
        # rank would make the backward passes differ, and ranks would gather parameters in different orders.
        rows_K = [log_probs_K, entropy_K]
        if head_term is not None:
            rows_K.append(head_term(hidden, head.weight, columns, temperature, **extra))
        return _StackRows.apply(entropy or EntropyUse(), *rows_K)

    head.forward = forward


def lm_head_of(model: Any) -> tuple[Any, float | None]:
    """The LM head's module and the cap of its logits."""
    head = model.get_output_embeddings()
    return head, _head_options(model, head).get("soft_cap")


def _most_likely(head: Any, hidden_KH: Tensor) -> Tensor:
    """The most likely token of each target as fp32 [1, K], which is exact below 2**24; a cap of the logits keeps it."""
    return nn.functional.linear(hidden_KH, head.weight, head.bias).argmax(dim=-1).float().unsqueeze(0)


def _install_value_forward(head: Any) -> None:
    original: Callable[..., Any] = head.forward

    def forward(hidden: Tensor, *, targets_K: Tensor | None = None, temperature: float = 1.0) -> Any:
        if targets_K is None:
            return original(hidden)
        # fp32: bf16 has three significant digits, and returns differ in the fourth.
        return nn.functional.linear(hidden.float(), head.weight.float()).T

    head.forward = forward


def _head_options(model: Any, head: nn.Module) -> dict[str, Any]:
    if type(head) is not nn.Linear:
        raise ModelError(f"{type(model).__name__}'s LM head is {type(head).__name__}, not a plain linear layer")
    soft_cap = getattr(model.config, "final_logit_softcapping", None)
    return {} if soft_cap is None else {"soft_cap": float(soft_cap)}


def _hidden_scale(model: Any) -> float:
    """Scale of the logits that some families apply; the head is linear, so its input is scaled instead."""
    config: Any = model.config
    if getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
        return float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides
        return 1.0 / float(config.logits_scaling)
    return 1.0
