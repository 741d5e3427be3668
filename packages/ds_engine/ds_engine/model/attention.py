"""Causal attention over packed sequences, registered with transformers as an attention implementation.

The model receives one row of T tokens without padding. A `PackedLayout` carries the sequence boundaries, so no [T, T]
mask is built. Four kernels compute the same result:

* flash4   FlashAttention-4, the package flash-attn-4 (Hopper and Blackwell, bf16 or fp16)
* flash    flash-attn's varlen kernel (CUDA, bf16 or fp16)
* varlen   torch.nn.attention.varlen, FlashAttention inside torch (CUDA, bf16 or fp16)
* sdpa     torch's scaled_dot_product_attention, once per sequence (any device and dtype)

On the CPU, 128 sequences of about 32 tokens take the same time one by one as in one padded [S, L] call (25 to 27 ms per
layer, forward and backward, one core), and sequences of unequal length take less, so there is no padded variant.
`Tensor.split` is essential: each slice would scatter a full-length gradient in the backward pass (5x slower).

With shared prefixes the sequences of a layout are the nodes of a tree, and keys those of each node's path
(prefix_tree.py): flash4 gathers them or reads them in place, the others and sliding windows gather them.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import EngineConfigError, ModelError
from .flash4 import KERNELS, flash4_attention
from .matching import MatchedAttention
from .prefix_tree import Borders, Crossings, TreeLayout, gather_rows, make_crossings, tree_layout
from .sequence_parallel import SequenceGroup, gather_heads, scatter_heads

if TYPE_CHECKING:
    from ..config import Attention


ATTENTION_NAME = "plinth_packed"
"""Name of this implementation in transformers' attention registry."""


def attention_options(config: Any) -> dict[str, Any]:
    """Options of transformers that select packed attention for the text model; a vision tower keeps upstream's."""
    if getattr(config, "vision_config", None) is None:
        return {"attn_implementation": ATTENTION_NAME}
    return {"attn_implementation": {"": ATTENTION_NAME, "text_config": ATTENTION_NAME}}


_SCORE_MODIFIERS = ("softcap", "s_aux", "position_bias", "cum_seq_lens")


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Boundaries of the sequences in a packed row, or of the nodes of a tree, and the attention kernel to run."""

    borders: Borders
    """Borders of the sequences, or nodes."""
    kernel: str
    """flash4, flash, varlen or sdpa."""
    sp_group: SequenceGroup | None = None
    """Ranks that share the row (sequence parallelism). Lengths describe the whole row, not this rank's slice."""
    calls: list[int] | None = None
    """Set in a model's first forward: packed attention appends the id of each module that calls it."""
    tree: TreeLayout | None = None
    """Set where sequences share prefixes."""
    crossings: Crossings | None = None
    """Set with flash4, also without a tree."""
    matched: MatchedAttention | None = None
    """Set with match_servers: `kernel` then computes gradients only."""
    blocks_T: Tensor | None = None
    """Numbers of the images to which tokens belong, -1 for text: those of an image attend to each other. SDPA only."""

    @property
    def keys(self) -> Borders:
        """Borders of the keys of each sequence or node."""
        return self.borders if self.tree is None else self.tree.paths


def packed_layout(
    lengths: Sequence[int],
    *,
    device: torch.device,
    kernel: str,
    sp_group: SequenceGroup | None = None,
    parents: Sequence[int] | None = None,
    keeps_paths: bool = False,
    blocks_T: Tensor | None = None,
) -> PackedLayout:
    """The layout of sequences, or of the nodes of a tree, with these numbers of tokens.

    Args:
        parents: the parent of each node, -1 for a root; None without shared prefixes.
        keeps_paths: flash4 may keep the keys and values of paths that it gathers until the backward pass.
        blocks_T: see `PackedLayout`.
    """
    if blocks_T is not None:
        kernel = "sdpa"
    tree = None if parents is None else tree_layout(parents, lengths, device)
    crossings = None
    if kernel == "flash4":
        nodes = parents or [-1] * len(lengths)
        crossings = make_crossings(nodes, lengths, tree, device, keeps_paths=keeps_paths)
    return PackedLayout(
        borders=Borders.make(lengths, device),
        kernel=kernel,
        sp_group=sp_group,
        tree=tree,
        crossings=crossings,
        blocks_T=blocks_T,
    )


def choose_kernel(wanted: Attention, *, device_type: str, dtype: torch.dtype) -> str:
    """Return the kernel to run for `wanted`; "auto" selects the fastest one available on this machine.

    Raises:
        EngineConfigError: the requested kernel cannot run here.
    """
    on_gpu = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    is_old = on_gpu and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    if wanted == "sdpa" or (wanted == "auto" and (is_old or not on_gpu)):
        return "sdpa"
    if is_old:
        problem = "it needs a GPU of compute capability 8.0 or newer (Ampere)"
        raise EngineConfigError(problem, field="attention", value=wanted, allowed="auto or sdpa")
    if not on_gpu:
        problem = f"it needs CUDA and bf16 or fp16, not {device_type} and {dtype}"
        raise EngineConfigError(problem, field="attention", value=wanted, allowed="auto or sdpa")
    for kernel, (module, package) in _MODULES.items():
        if wanted not in ("auto", kernel):
            continue
        if _is_installed(module) and (kernel != "flash4" or _runs_flash4(wanted)):
            return kernel
        if wanted == kernel:
            problem = f"it needs {package}, which is not available here"
            raise EngineConfigError(problem, field="attention", value=wanted, remedy="use auto")
    return "sdpa"


_MODULES = {
    "flash4": ("flash_attn.cute", "flash-attn-4 and a Hopper or Blackwell GPU"),
    "flash": ("flash_attn", "flash-attn"),
    "varlen": ("torch.nn.attention.varlen", "torch.nn.attention.varlen (torch 2.10 or newer)"),
}
"""Module and requirement of each kernel, fastest first."""


def _runs_flash4(wanted: Attention) -> bool:
    """True if this GPU is Hopper or, unless `wanted` is "auto", Blackwell, which is not measured."""
    return KERNELS.check() and torch.cuda.get_device_capability()[0] in ((9,) if wanted == "auto" else (9, 10))


def _is_installed(module: str) -> bool:
    """True if `module` can be imported. A namespace package does not count: flash-attn-4 makes `flash_attn` one."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # raised if the parent package is missing
        return False
    return spec is not None and spec.origin is not None


def register_packed_attention() -> None:
    """Register `attn_implementation=ATTENTION_NAME` with transformers. Idempotent."""
    from transformers import AttentionInterface

    # transformers builds no mask because no mask function is registered under this name.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute packed attention with the signature that transformers calls.

    Args:
        query: [1, heads, T, head dim]; key and value: [1, kv heads, T, head dim].
        sliding_window: number of tokens a token attends to, itself included; None attends to all tokens before it.
        packing: sequence boundaries, which the packed forward passes down.

    Returns:
        ([1, T, heads, head dim], None)

    Raises:
        ModelError: the model does not pass `packing` down to attention, or modifies scores in
            a way this function does not support.
    """
    del dropout  # attention dropout is always off: it would add noise to the log-probs
    if packing is None:
        raise ModelError(
            f"{type(module).__name__} did not receive the sequence boundaries: its forward does not pass keyword "
            "arguments on to attention, so sequences would attend to each other"
        )
    unsupported = [name for name in _SCORE_MODIFIERS if kwargs.get(name) is not None]
    if unsupported:
        raise ModelError(
            f"{type(module).__name__} uses {', '.join(unsupported)}, which packed attention does not support"
        )
    if packing.calls is not None:
        packing.calls.append(id(module))
    if sliding_window is not None and sliding_window >= packing.keys.longest:
        sliding_window = None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Latent attention has smaller values than queries, which all-to-alls, flash-attn and varlen do not know.
    missing = query.shape[-1] - value.shape[-1]
    padded = missing > 0 and (packing.sp_group is not None or packing.kernel in ("flash", "varlen"))
    if padded:
        value = F.pad(value, (0, missing))
    # A view also of gradients, which `x[0]` copies.
    q_Thd, k_Thd, v_Thd = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if packing.sp_group is not None:
        q_Thd, k_Thd, v_Thd = scatter_heads(q_Thd, k_Thd, v_Thd, packing.sp_group)
    keys = packing.borders
    knows_paths = packing.kernel == "flash4" and sliding_window is None  # asked first: no tree in compiled graphs
    if not knows_paths and packing.tree is not None:
        k_Thd, v_Thd = (gather_rows(x, packing.tree.path_rows) for x in (k_Thd, v_Thd))
        keys = packing.tree.paths

    def usual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _KERNELS[packing.kernel](q, k, v, packing, keys, scale, sliding_window)

    if packing.matched is None:
        out = usual(q_Thd, k_Thd, v_Thd)
    else:
        out = packing.matched.attend(q_Thd, k_Thd, v_Thd, scale, usual)
    if packing.sp_group is not None:
        out = gather_heads(out, packing.sp_group)
    if padded:
        out = out[..., :-missing]
    return out.unsqueeze(0), None


Kernel = Callable[[Tensor, Tensor, Tensor, PackedLayout, Borders, float, "int | None"], Tensor]
"""(query, key, value, layout, borders of the keys, scale, window) -> [T, heads, head dim]. A sequence with more keys
than queries is causal from the bottom right."""


def _flash4(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, keys: Borders, scale: float, sliding_window: int | None
) -> Tensor:
    crossings = packing.crossings
    assert crossings is not None
    if sliding_window is not None:  # keys are those of the paths: nothing is left to cross
        crossings = crossings.without_paths()
    return flash4_attention(q, k, v, packing.borders, keys, crossings, scale, sliding_window)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, keys: Borders, scale: float, sliding_window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    window = (sliding_window - 1, 0) if sliding_window is not None else (-1, -1)
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True, "window_size": window}
    out: Tensor = flash_attn_varlen_func(q, k, v, *_varlen_borders(packing, keys), **options)
    return out


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, keys: Borders, scale: float, sliding_window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    known = varlen_parameters()
    options: dict[str, Any] = {"scale": scale}
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    if "window_size" in known:
        options["window_size"] = (sliding_window - 1 if sliding_window is not None else -1, 0)
    elif sliding_window is not None:
        problem = "this torch's varlen attention has no sliding window"
        raise ModelError(problem, field="attention", value="varlen", allowed="flash or sdpa")
    else:
        options["is_causal"] = True
    out = varlen_attn(q, k, v, *_varlen_borders(packing, keys), **options)
    assert isinstance(out, Tensor), "no auxiliary output was requested"
    return out


def _varlen_borders(packing: PackedLayout, keys: Borders) -> tuple[Tensor, Tensor, int, int]:
    return packing.borders.cu_seqlens, keys.cu_seqlens, packing.borders.longest, keys.longest


def varlen_parameters() -> tuple[str, ...]:
    """Parameter names of this torch version's varlen_attn. `compile_layers` declares them constant."""
    from torch.nn.attention.varlen import varlen_attn

    return tuple(inspect.signature(varlen_attn).parameters)


def _sdpa_per_sequence(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, keys: Borders, scale: float, sliding_window: int | None
) -> Tensor:
    enable_gqa = q.shape[1] != k.shape[1]
    queries = q.transpose(0, 1).unsqueeze(0).split(list(packing.borders.lengths), 2)
    paths = [x.transpose(0, 1).unsqueeze(0).split(list(keys.lengths), 2) for x in (k, v)]
    blocks = (
        [None] * len(queries) if packing.blocks_T is None else packing.blocks_T.split(list(packing.borders.lengths))
    )
    outs = []
    for query, key, value, block in zip(queries, *paths, blocks, strict=True):
        num_queries, num_keys = query.shape[2], key.shape[2]
        mask = None
        if num_keys > min(num_queries, sliding_window or num_keys) or block is not None:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
            if block is not None:
                mask |= (block[:, None] == block) & (block >= 0)
            if sliding_window is not None:
                mask = mask.triu(1 + num_keys - num_queries - sliding_window)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None}
        outs.append(F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa, **options))
    # Contiguous, as upstream's: some models take views of it, and the others would copy it in their reshape.
    return torch.cat(outs, dim=2)[0].transpose(0, 1).contiguous()


_KERNELS: dict[str, Kernel] = {"flash4": _flash4, "flash": _flash, "varlen": _varlen, "sdpa": _sdpa_per_sequence}
