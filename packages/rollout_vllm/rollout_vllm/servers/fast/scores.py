"""Log-probs and ranks of sampled tokens, with every row of logits divided among many programs of the GPU.

vLLM's two kernels run one program a row, which reads the whole vocabulary in blocks, one after the other: with 128
requests and 150,000 tokens most of the time is latency. Here every block is a program of its own, and a second kernel
merges the blocks of a row. Sums are in float32, in an order that depends on the vocabulary alone.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plinth_base.fence import Replace

_BLOCK = 8192
_CLOSE = 1e-4
"""Largest difference of log-probs from vLLM's kernel, relative to 1 + their size: float32 sums in another order."""


@triton.jit
def _block_kernel(
    parts_ptr, logits_ptr, row_stride, tokens_ptr, vocab_size, num_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """Largest logit, sum of exp(logit - largest) and number of logits that reach the token's, of one block of a row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    given = tl.load(row_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    there = columns < vocab_size
    logits = tl.load(row_ptr + columns, mask=there, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # a block of masked tokens adds nothing
    out = parts_ptr + (row * num_blocks + block) * 3
    tl.store(out, largest)
    tl.store(out + 1, tl.sum(tl.exp(logits - shift), axis=0))
    tl.store(out + 2, tl.sum(((logits >= given) & there).to(tl.int32), axis=0).to(tl.float32))


@triton.jit
def _merge_kernel(
    log_probs_ptr, ranks_ptr, parts_ptr, logits_ptr, row_stride, tokens_ptr, num_blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    given = tl.load(logits_ptr + row * row_stride + tl.load(tokens_ptr + row)).to(tl.float32)
    blocks = tl.arange(0, BLOCKS)
    there, part = blocks < num_blocks, parts_ptr + (row * num_blocks + blocks) * 3
    tops = tl.load(part, mask=there, other=float("-inf"))
    sums = tl.load(part + 1, mask=there, other=0.0)
    counts = tl.load(part + 2, mask=there, other=0.0)
    largest = tl.max(tops, axis=0)
    total = tl.sum(tl.where(tops == float("-inf"), 0.0, sums * tl.exp(tops - largest)), axis=0)
    tl.store(log_probs_ptr + row, given - largest - tl.log(total))
    tl.store(ranks_ptr + row, tl.sum(counts.to(tl.int32), axis=0).to(tl.int64))


def token_scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of one token a row, and its rank: the number of logits that are at least its own.

    Args:
        logits: [rows, vocabulary], any floating dtype, on a GPU; the last dimension is contiguous.
        tokens: [rows] int64.

    Returns:
        [rows] float32 log-probs (natural logarithm), [rows] int64 ranks.
    """
    rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    parts = torch.empty((rows, num_blocks, 3), dtype=torch.float32, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    _block_kernel[(rows, num_blocks)](
        parts, logits, stride, tokens, vocab_size, num_blocks, BLOCK=_BLOCK, num_warps=8
    )  # fmt: skip
    padded = triton.next_power_of_2(num_blocks)
    _merge_kernel[(rows,)](log_probs, ranks, parts, logits, stride, tokens, num_blocks, BLOCKS=padded, num_warps=1)
    return log_probs, ranks


def divide_rows(replace: Replace) -> Callable[[], None]:
    """Score sampled tokens with `token_scores` where requests want no other log-probs.

    The first step that does compares the scores with vLLM's own. If they differ, or cannot be computed, vLLM's way is
    used from then on and one line says so. Returns the function that restores vLLM's way.
    """
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler

    stock = sampler.compute_topk_scores
    compared = False

    def compute_topk_scores(
        logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, cu_num_logits: Any = None, **options: Any
    ) -> Any:
        nonlocal compared
        plain = not num_logprobs and cu_num_logits is None and not options.get("max_per_req_token_ids")
        if not plain or options.get("logits_mode") or not logits.shape[0] or logits.stride(-1) != 1:
            return stock(logits, num_logprobs, sampled_token_ids, cu_num_logits, **options)
        if not compared:
            compared = True
            expected = stock(logits, num_logprobs, sampled_token_ids, cu_num_logits, **options)
            if problem := _problem(logits, sampled_token_ids, expected):
                print(f"scores of sampled tokens: vLLM's own path is used: {problem}", flush=True)
                restore()
            return expected
        log_probs, ranks = token_scores(logits, sampled_token_ids)
        return LogprobsTensors(
            logprob_token_ids=sampled_token_ids.unsqueeze(-1),
            logprobs=log_probs.unsqueeze(-1),
            selected_token_ranks=ranks,
        )

    restore = replace(sampler, compute_topk_scores=compute_topk_scores)
    return restore


def _problem(logits: Tensor, tokens: Tensor, expected: Any) -> str:
    """Difference from vLLM's scores, or the error; empty if both agree."""
    try:
        log_probs, ranks = token_scores(logits, tokens)
        theirs, their_ranks = expected.logprobs.flatten(), expected.selected_token_ranks
        close = torch.isclose(log_probs, theirs, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
        if not close.all():
            return f"log-probs {log_probs[~close][:4].tolist()} differ from {theirs[~close][:4].tolist()}"
        wrong = ranks != their_ranks
        if wrong.any():
            return f"ranks {ranks[wrong][:4].tolist()} differ from {their_ranks[wrong][:4].tolist()}"
    except Exception as error:  # of another Triton's compiler, for example
        return f"{type(error).__name__}: {error}"
    return ""
