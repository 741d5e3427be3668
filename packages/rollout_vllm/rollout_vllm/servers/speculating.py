"""Speculative decoding of a server, verified by the settings of the requests; fast/drafting.py decides when to draft.

vLLM proposes the tokens that followed the last ones earlier in the sequence (`ngram`), and one step verifies them by
rejection sampling: a draft is kept with the target model's probability, and the token after the last kept one is drawn
from the rest of the distribution. The distribution and the log-probs are those of the target model, drafts or not.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from plinth_base.fence import Replace


def expand(values: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """[num_tokens], the value of each request for each of its drafts.

    Args:
        values: [requests], such as temperatures; `replace_from` becomes `replace_to`.
        ends: [requests], cumulative numbers of drafts.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def verify_by_request(replace: Replace, *, on_gpu: bool) -> Callable[[], None]:
    """Verify drafts with the temperature, top-k and top-p of their requests.

    vLLM 0.32 writes these to a copy on the CPU, so drafts are verified with what the memory happens to hold. It also
    looks for the largest top-k of the drafts in steps without any, which ends the engine.
    """
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        return stock(logits, k, p) if len(logits) else logits

    own = {} if on_gpu else {"expand_batch_to_tokens": expand}
    return replace(rejection_sampler, apply_top_k_top_p=apply_top_k_top_p, **own)
