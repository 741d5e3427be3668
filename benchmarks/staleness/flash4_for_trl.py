"""FlashAttention-4 in place of the FlashAttention-3 that TRL's AsyncGRPOTrainer fetches from the Hugging Face Hub.

TRL packs samples into a prefix tree and attends with `flash_attn_varlen_func` of `kernels-community/flash-attn3`, which
the package `kernels` loads. For a repository that LOCAL_KERNELS names, `kernels` loads a folder and asks no network.
`install` writes that folder; its function calls flash-attn-4. All of TRL's code runs as it is, and the attention is the
same: both kernels align the causal mask with the last key and let groups of heads share a key head. Source: trl 1.16,
experimental/async_grpo/packing.py; kernels 0.17, load.py; flash-attn-4 4.0.0b36, flash_attn/cute/interface.py.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

REPOSITORY = "kernels-community/flash-attn3"
TOLERANCE = 0.02
"""Of relative differences from float32: bfloat16 has 0.002 to 0.005, a wrong mask or gradient more than 0.1."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    """FlashAttention-3's function as TRL calls it: FlashAttention-4 has another argument after `v`.

    Args:
        q: [total queries, heads, head dim], bfloat16 or float16.
        k: [total keys, key heads, head dim], like `v`.
        options: softmax_scale, causal, window_size and softcap, which mean the same in both.
    """
    from flash_attn.cute import flash_attn_varlen_func as flash4

    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    out: Tensor = flash4(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **lengths, **options)[0]
    return out


def install(folder: Path) -> None:
    """Writes a kernel that is the function above into `folder`, and makes it TRL's in this process.

    Raises:
        RuntimeError: TRL's attention has another kernel.
    """
    from trl.experimental.async_grpo.packing import _flash_attn

    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"id": "flash4_for_trl", "name": "flash-attn4", "version": 1, "license": "BSD-3-Clause"}
    metadata |= {"python-depends": [], "backend": {"type": "cuda"}}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    (folder / "__init__.py").write_text(f"from {__name__} import flash_attn_varlen_func\n")
    os.environ["LOCAL_KERNELS"] = f"{REPOSITORY}={folder.absolute()}"
    if _flash_attn().flash_attn_varlen_func is not flash_attn_varlen_func:
        raise RuntimeError(f"TRL's attention has another kernel than {folder}")


def differences(heads: int, key_heads: int, head_dim: int, *, device: str = "cuda") -> dict[str, float]:
    """Compares TRL's attention in bfloat16 with SDPA in float32 on a tree of two prompts with four responses each.

    Returns:
        The relative differences (L2) of the output and the gradients of queries, keys and values.

    Raises:
        RuntimeError: one is above `TOLERANCE`.
    """
    from trl.experimental.async_grpo.packing import TreeRow, tree_attention

    torch.manual_seed(0)
    row = TreeRow()
    for group_id, length in enumerate((297, 1)):
        prompt = torch.randint(1000, (length,))
        for response in torch.randint(1, 513, (4,)).tolist():
            ids = torch.cat([prompt, torch.randint(1000, (response,))])
            sample = {"input_ids": ids, "completion_mask": ids, "old_log_probs": ids, "advantage": 0.0}
            row.add(sample | {"group_id": group_id})
    packed = row.pack()
    borders_q, borders_k = packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"]
    index = packed["tree_kv_index"].to(device)
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), packed["tree_max_seqlens"].tolist(), strict=True))
    tensors = [torch.randn(1, n, int(borders_q[-1]), head_dim, device=device) for n in (heads, key_heads, key_heads)]
    tensors = [tensor.bfloat16().requires_grad_() for tensor in tensors]
    plain = [tensor.detach().float().requires_grad_() for tensor in tensors]

    out, _ = tree_attention(
        torch.nn.Module(),
        *tensors,
        None,
        tree_kv_index=index,
        tree_cu_seqlens_q=borders_q.to(device),
        tree_cu_seqlens_k=borders_k.to(device),
        **longest,
    )
    segments = []
    paths = index.split(borders_k.diff().tolist())
    for begin, end, path in zip(borders_q[:-1].tolist(), borders_q[1:].tolist(), paths, strict=True):
        q, k, v = plain[0][:, :, begin:end], plain[1][:, :, path], plain[2][:, :, path]
        mask = torch.ones(end - begin, len(path), dtype=torch.bool, device=device).tril(len(path) - (end - begin))
        segments.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))
    expected = torch.cat(segments, dim=2).transpose(1, 2)

    grad = torch.randn_like(expected)
    pairs = zip(
        [out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))],
        [expected, *torch.autograd.grad(expected, plain, grad)],
        strict=True,
    )
    with torch.no_grad():
        measured = [float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    named = dict(zip(("output", "dq", "dk", "dv"), measured, strict=True))
    if not all(each < TOLERANCE for each in measured):  # nan is above it, too
        raise RuntimeError(f"FlashAttention-4 under TRL's attention differs from SDPA: {named}")
    return named
