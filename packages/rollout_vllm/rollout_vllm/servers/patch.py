"""Fence around private parts of vLLM that the server process replaces or reads: without them vLLM's own path runs."""

from functools import partial

from plinth_base.fence import Fence

_say = partial(print, flush=True)
FENCE = Fence({"vllm": ">=0.26,<0.33"}, warn=_say, announce=_say)
"""vLLM's tested versions; pyproject.toml states the same."""

IDS_ONLY = "plinth_ids_only"
"""Name in a request's `vllm_xargs` of a client that reads only token ids and their log-probs, packed."""

FORK = FENCE.patch(
    name="forked engine",
    otherwise="stock path",
    reason="engine and worker are forked, because each new interpreter imports vLLM again for 8 to 20 s",
    replaces={"vllm.utils.system_utils": ("get_mp_context()",)},
)
_STATE = "tokenizer, request, prompt, parent_req, request_index, queue, log_stats, stream_interval"
_RESPONSE = "final_res_batch, request, request_id, created_time, model_name, tokenizer, request_metadata"
BUFFERING = FENCE.patch(
    name="buffered tokens",
    otherwise="stock path",
    reason="sending and decoding each token and its log-prob in Python takes longer than a decoding step",
    replaces={
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "add_request(request)",
            "update_from_output(scheduler_output, model_runner_output)",
        ),
        "vllm.v1.engine.core:EngineCore": ("abort_requests(request_ids)",),
        "vllm.v1.engine.core:EngineCoreProc": ("_send_finish_outputs_to_client(req_ids, client_index, finish_reason)",),
        "vllm.v1.engine.output_processor:RequestState": (f"from_new_request({_STATE})",),
        "vllm.v1.engine.output_processor:OutputProcessor": ("abort_requests(request_ids, internal)",),
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": (
            f"request_output_to_completion_response({_RESPONSE})",
        ),
    },
    reads={
        "vllm.v1.engine.core:EngineCoreProc": ("_send_abort_outputs_to_client(req_ids, client_index)",),
        "vllm.v1.engine:EngineCoreOutput": (
            "new_token_ids",
            "new_logprobs",
            "finish_reason",
            "prefill_stats",
            "events",
            "routed_experts",
        ),
        "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
        "vllm.v1.engine.logprobs:LogprobsProcessor": ("update_from_output(output)",),
        "vllm.v1.outputs:LogprobsLists": (
            "slice_request(req_idx, num_positions)",
            "logprobs",
            "cu_num_generated_tokens",
        ),
        "vllm.v1.outputs:ModelRunnerOutput": ("logprobs", "sampled_token_ids", "req_id_to_index", "num_nans_in_logits"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("num_scheduled_tokens", "scheduled_spec_decode_tokens"),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("schedule",),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("cache_blocks",),
        "vllm.v1.request:Request": (
            "_output_token_ids",
            "_all_token_ids",
            "update_block_hashes()",
            "num_tokens",
            "num_output_tokens",
        ),
        "vllm.sampling_params:SamplingParams": (
            "extra_args",
            "output_kind",
            "logprobs",
            "prompt_logprobs",
            "logprob_token_ids",
            "stop",
            "stop_token_ids",
            "eos_token_id",
            "repetition_detection",
        ),
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest": (
            "vllm_xargs",
            "logprobs",
            "return_token_ids",
            "stream",
            "model_copy",
            "model_validate_json",
        ),
        "vllm.entrypoints.openai.completion.protocol:CompletionResponse": ("model_dump_json",),
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": (
            "create_completion(request, raw_request)",
        ),
        "vllm.v1.engine.core_client:AsyncMPClient": ("call_utility_async(method, ...)",),
    },
)
DECODING = FENCE.patch(
    name="short scheduling of decoded tokens",
    otherwise="stock path",
    reason="looking for blocks of the KV cache takes half of a step's scheduling, and 15 of 16 tokens need none",
    replaces={
        "vllm.v1.core.kv_cache_manager:KVCacheManager": (
            "allocate_slots",
            "cache_blocks(request, num_computed_tokens)",
        ),
        "vllm.v1.core.sched.scheduler:Scheduler": ("schedule(throttle_prefills)",),
    },
    reads={
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("create_kv_cache_blocks(blocks)",),
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": ("cache_blocks", "allocate_new_blocks"),
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "get_request_counts()",
            "running",
            "max_num_scheduled_tokens",
            "prev_step_scheduled_req_ids",
            "use_v2_model_runner",
            "num_sampled_tokens_per_step",
            "_pause_state",
        ),
        "vllm.v1.core.sched.output:CachedRequestData": (
            "__init__(req_ids, resumed_req_ids, new_token_ids, all_token_ids, new_block_ids, num_computed_tokens, "
            "num_output_tokens)",
        ),
        "vllm.v1.core.sched.interface:PauseState": ("UNPAUSED",),
        "vllm.v1.request:Request": (
            "num_tokens",
            "num_tokens_with_spec",
            "num_output_tokens",
            "num_output_placeholders",
            "num_in_flight_tokens",
            "is_prefill_chunk",
            "has_encoder_inputs",
            "use_structured_output",
            "resumable",
        ),
    },
)
_FORWARD = "layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale"
_LAYER = "num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap"
ATTENTION = FENCE.patch(
    name="attention of decoding steps",
    otherwise="stock path",
    reason="FlashAttention reads a prompt's keys for each of its samples, and computes tiles of 64 or more queries",
    replaces={
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": (
            f"forward({_FORWARD})",
            f"__init__({_LAYER}, attn_type, kv_sharing_target_layer_name, sinks)",
        )
    },
    reads={
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": (
            "do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)",  # apart from forward
        ),
        "vllm.config": ("get_current_vllm_config_or_none()",),
        "vllm.config:CUDAGraphMode": ("mixed_mode()", "FULL"),
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata": (
            "num_actual_tokens",
            "max_query_len",
            "seq_lens",
            "block_table",
            "causal",
            "dcp_context_kv_lens",
            "rswa_prefix_lens",
        ),
    },
)
_FORWARDS = ("forward_native", "forward_cuda", "forward_cpu")
_SCORES = ("compute_topk_scores(logits, num_logprobs, sampled_token_ids, ...)",)
_METHOD = ("apply(layer, x, bias)", "process_weights_after_loading(layer)")
EXACT = FENCE.patch(
    name="operations of the trainer",
    otherwise="refused",
    reason="vLLM's layers round in other places than those of transformers, and in another order for other batches",
    replaces={
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod": _METHOD,
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod": _METHOD,
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": _METHOD[1:],
        "vllm.model_executor.models.qwen3_moe:Qwen3MoeSparseMoeBlock": ("forward(hidden_states)",),
        "vllm.model_executor.layers.layernorm:RMSNorm": _FORWARDS,
        "vllm.model_executor.layers.activation:SiluAndMul": _FORWARDS,
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": _FORWARDS,
        "vllm.model_executor.layers.logits_processor:LogitsProcessor": ("_get_logits",),
        "vllm.v1.sample.sampler:Sampler": ("compute_logprobs(logits)",),
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler": ("forward_native",),
        "vllm.v1.worker.gpu.sample.sampler": _SCORES,
        "vllm.v1.worker.gpu.sample.prompt_logprob": _SCORES,
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": (f"forward({_FORWARD})",),
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": (
            f"forward({_FORWARD})",
            "do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)",
        ),
    },
    reads={
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase": ("_compute_inv_freq(base)",),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": ("routed_experts",),
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": ("top_k", "renormalize"),
    },
)
STORE = FENCE.patch(
    name="store of the worker in a file",
    otherwise="stock path",
    reason="vLLM before 0.32 opens torch's TCPStore of the worker on every interface, without a password",
    replaces={"vllm.utils.network_utils": ("get_distributed_init_method(ip, port)",)},
    reads={"vllm.envs": ("VLLM_RPC_BASE_PATH",)},
)
WARM_UP = FENCE.patch(
    name="no warm-up of other models' routers",
    otherwise="stock path",
    reason="vLLM 0.26 compiles the router kernels of four MoE models at every start on Hopper, which takes 9 s; "
    "without it, a model that has such a router compiles its kernels at its first request",
    replaces={"vllm.model_executor.warmup.kernel_warmup": ("_warmup_ll_bf16_router_gemm",)},
)
ROUTES = FENCE.patch(
    name="routed experts on the CPU",
    otherwise="refused",
    reason="vLLM returns routed experts from its second model runner alone, which the CPU lacks without Triton",
    replaces={
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner": (
            "load_model(load_dummy_weights)",
            "execute_model(scheduler_output, intermediate_tensors)",
            "sample_tokens(grammar_output)",
        ),
        "vllm.v1.core.sched.scheduler:Scheduler": ("update_from_output(scheduler_output, model_runner_output)",),
    },
    reads={
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer": (
            "bind_routed_experts_capturer(model, capturer)",
        ),
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer": (
            "__init__(max_num_batched_tokens, vllm_config)",
            "snapshot_routing_data(num_tokens)",
        ),
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner": ("input_batch", "vllm_config", "model"),
        "vllm.v1.worker.gpu_input_batch:InputBatch": ("req_ids", "num_computed_tokens_cpu"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("num_scheduled_tokens", "total_num_scheduled_tokens"),
        "vllm.v1.engine:EngineCoreOutput": ("routed_experts", "new_token_ids", "request_id"),
    },
)
IMAGES = FENCE.patch(
    name="images of completion requests",
    otherwise="refused",
    reason="vLLM takes images in chat requests, as base64, and expands their placeholders where a client sees nothing",
    replaces={
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": ("render_completion_request(request)",),
        "vllm.renderers.online_renderer:OnlineRenderer": ("render_completion(request, ...)",),
        "vllm.multimodal.processing.processor:BaseMultiModalProcessor": ("_maybe_apply_prompt_updates",),
    },
    reads={
        "vllm.renderers.online_renderer:OnlineRenderer": ("create_error_response",),
        "vllm.renderers.base:BaseRenderer": ("render_cmpl_async(prompts, ...)",),
        "vllm.multimodal.processing.processor:BaseMultiModalProcessor": (
            "_find_mm_placeholders(new_token_ids, mm_prompt_updates)",
        ),
        "vllm.inputs": ("TokensPrompt",),
    },
)
VERIFYING = FENCE.patch(
    name="sampling settings of drafts",
    otherwise="refused",
    reason="vLLM 0.32 verifies drafts on the CPU with temperatures that it never wrote, and fails without drafts",
    replaces={
        "vllm.v1.sample.rejection_sampler": (
            "apply_top_k_top_p(logits, k, p)",
            "expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)",
        )
    },
)
DRAFTING = FENCE.patch(
    name="drafts where they save time",
    otherwise="stock path",
    reason="vLLM drafts for every step, also where verifying takes longer than it saves",
    replaces={
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "update_from_output(scheduler_output, model_runner_output)",
            "update_draft_token_ids(draft_token_ids)",
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("propose_draft_token_ids",),
    },
    reads={
        "vllm.v1.outputs:DraftTokenIds": ("req_ids", "draft_token_ids"),
        "vllm.v1.outputs:ModelRunnerOutput": ("sampled_token_ids",),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
        ),
    },
)
SOCKETS = FENCE.patch(
    name="folder of sockets",
    otherwise="stock path",
    reason="a server's sockets are removed with it, also when it is killed",
    reads={"vllm.envs": ("VLLM_RPC_BASE_PATH",)},
)


def records() -> list[dict[str, str]]:
    """One row for each patch of the server process, with its state here: active, stock path or not installed."""
    return FENCE.records()


def untested_vllm() -> str | None:
    """Reason why the installed vLLM counts as untested; None if it is tested. Servers of an untested vLLM use its own
    paths, and do not label tokens with policy versions."""
    return FENCE.untested("vllm")
