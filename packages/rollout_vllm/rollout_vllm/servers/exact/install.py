"""Puts the operations of `operations.py` into vLLM's layers, which then compute what those of transformers compute.

vLLM's merged products stay (a column of a product does not depend on the others), as do its cache and its scheduler.
Its norms, rotary positions and activations round in other places than those of transformers, so these are replaced too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plinth_base.fence import Replace

from . import operations


def match_transformers(replace: Replace, *, on_gpu: bool) -> None:
    """Replace the layers of Llama-like models, in the process of the engine core, before the model is built."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return operations.linear(x, layer.weight, bias)

    def keep_weights(self: Any, layer: Any) -> None:
        """vLLM would pack them for its own products: all on a CPU, a mixture's experts also for some GPUs."""

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        replace(method, apply=apply, process_weights_after_loading=keep_weights)
    replace(UnquantizedFusedMoEMethod, process_weights_after_loading=keep_weights)
    replace(Qwen3MoeSparseMoeBlock, forward=_mixture)

    _replace_forward(replace, RMSNorm, _norm)
    _replace_forward(replace, SiluAndMul, _silu_and_mul)
    _replace_forward(replace, RotaryEmbedding, _rotate)

    get_logits = LogitsProcessor._get_logits

    def wide_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = get_logits(*args, **kwargs)
        return None if logits is None else logits.float()

    replace(LogitsProcessor, _get_logits=wide_logits)
    if on_gpu:
        _replace_on_gpu(replace)
    else:
        _replace_on_cpu(replace)


def _replace_forward(replace: Replace, layer: Any, forward: Callable[..., Any]) -> None:
    """All forms of an operation of vLLM, which chooses one by platform and compilation."""
    replace(layer, forward_native=forward, forward_cuda=forward, forward_cpu=forward)


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return operations.rms_norm(x, self.weight, self.variance_epsilon)
    return operations.add_rms_norm(x, residual, self.weight, self.variance_epsilon)


def _silu_and_mul(self: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return operations.silu_and_mul(gate, up)


def _mixture(self: Any, hidden_states: Tensor) -> Tensor:
    layer = self.experts.routed_experts
    logits = operations.linear(hidden_states, self.gate.weight)
    routes = operations.route(logits, layer.top_k, layer.renormalize)
    return operations.experts(hidden_states, layer.w13_weight, layer.w2_weight, *routes)


def _rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    table = getattr(self, "plinth_table", None)
    if table is None:
        with torch.device("cpu"):  # where transformers computes them
            frequencies = self._compute_inv_freq(self.base)
        table = operations.rotary_table(frequencies.to(query.device), self.max_position_embeddings, query.dtype)
        self.plinth_table = table
    positions = positions.flatten()

    def rotated(x: Tensor) -> Tensor:
        return operations.rotate(x.view(len(positions), -1, self.head_size), table, positions).view(x.shape)

    return rotated(query), None if key is None else rotated(key)


def _attend(layer: Any, query: Tensor, kv_cache: Tensor, step: Any, output: Tensor) -> None:
    size, num = layer.head_size, step.num_actual_tokens
    shape = (-1, layer.num_heads, size)
    operations.attention(
        query[:num].view(shape),
        kv_cache[..., :size],
        kv_cache[..., size:],
        step.block_table,
        step.query_start_loc,
        step.seq_lens,
        layer.scale,
        step.max_query_len,
        out=output[:num].view(shape),
    )


def _replace_on_gpu(replace: Replace) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample import prompt_logprob, sampler

    def forward(
        self: Any, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        _attend(self, query, kv_cache, attn_metadata, output)
        return output

    replace(FlashAttentionImpl, forward=forward)
    replace(Sampler, compute_logprobs=staticmethod(operations.log_probs))
    draw = TopKTopPSampler.forward_native

    def draw_and_score(self: Any, logits: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """Of vLLM's first model runner, which serves what the second one does not, such as mixtures in vLLM 0.26."""
        sampled, _ = draw(self, logits, *options)
        return sampled, operations.log_probs(logits)

    replace(TopKTopPSampler, forward_native=draw_and_score)
    stock = sampler.compute_topk_scores

    def scores(
        logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, cu_num_logits: Any = None, **options: Any
    ) -> Any:
        log_probs_N = operations.token_log_probs(logits, sampled_token_ids)
        others = num_logprobs or options.get("max_per_req_token_ids") or options.get("logits_mode")
        if others or cu_num_logits is not None:
            result = stock(logits, num_logprobs, sampled_token_ids, cu_num_logits, **options)
            result.logprobs[:, 0] = log_probs_N
            return result
        ids_N1 = sampled_token_ids[:, None]
        ranks_N = (logits >= logits.gather(-1, ids_N1)).sum(-1)
        return LogprobsTensors(logprob_token_ids=ids_N1, logprobs=log_probs_N[:, None], selected_token_ranks=ranks_N)

    replace(sampler, compute_topk_scores=scores)
    replace(prompt_logprob, compute_topk_scores=scores)


def _replace_on_cpu(replace: Replace) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def forward(
        self: Any, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is not None:
            _attend(self, query, kv_cache, attn_metadata, output)
        return output

    def do_kv_cache_update(
        self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size, slots = kv_cache.shape[2], slot_mapping.long()
        kept = slots >= 0
        slots = slots[kept]
        both = torch.cat((key[: len(kept)][kept], value[: len(kept)][kept]), dim=-1)
        kv_cache[slots // size, :, slots % size] = both

    replace(CPUAttentionBackendImpl, forward=forward, do_kv_cache_update=do_kv_cache_update)
