"""Keys of DeepSpeed's `zero_optimization` section that `zero.deepspeed` refuses, and what to set instead. Pure.

Every other key goes to DeepSpeed, whose own model refuses names and values that it does not know
(`zero.ds_config.check_deepspeed`).
"""

_OFFLOAD = "set zero.offload.optimizer and zero.offload.param"
_EXPORT = "the engine exports whole weights at every stage (export_parameters; in the apps trainer.export_model)"
_CHECKPOINTS = "the engine's own checkpoints decide it"
_GRADIENTS = "the engine has its own reduction and accumulation of gradients, which does not support it"
_PARTITIONING = "weight sync, exports and checkpoints expect DeepSpeed's plain partitioning"
_LAYERS = "the engine gathers whole transformer layers"

OWNED: dict[str, str] = {
    "stage": "set zero.stage",
    "reduce_bucket_size": "set zero.reduce_bucket_bytes (bytes, not elements)",
    "allgather_bucket_size": "set zero.reduce_bucket_bytes (bytes, not elements)",
    "overlap_comm": "set zero.overlap_comm",
    "stage3_param_persistence_threshold": "set zero.param_persistence_elements",
    "param_persistence_threshold": "set zero.param_persistence_elements",
    **dict.fromkeys(("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param"), _OFFLOAD),
    "cpu_offload_use_pin_memory": "the engine pins offloaded memory on CUDA",
    "contiguous_gradients": "the engine sets it by stage",
    "reduce_scatter": "the engine always reduces with reduce-scatter",
    "stage3_gather_16bit_weights_on_model_save": _EXPORT,
    "gather_16bit_weights_on_model_save": _EXPORT,
    "stage3_gather_fp16_weights_on_model_save": _EXPORT,
    **dict.fromkeys(("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"), _CHECKPOINTS),
    "compute_grad_norm": "the engine reports the gradient norm of every step",
    **dict.fromkeys(("round_robin_gradients", "use_multi_rank_bucket_allreduce", "allgather_partitions"), _GRADIENTS),
    **dict.fromkeys(("legacy_stage1", "zenflow", "zero_quantized_gradients", "parameter_alignment"), _GRADIENTS),
    **dict.fromkeys(("zero_quantized_weights", "zero_quantized_nontrainable_weights"), _PARTITIONING),
    **dict.fromkeys(("mics_shard_size", "mics_hierarchical_params_gather"), _PARTITIONING),
    **dict.fromkeys(("leaf_module", "stage3_module_granularity_threshold", "module_granularity_threshold"), _LAYERS),
    **dict.fromkeys(("override_module_apply", "memory_efficient_linear"), _LAYERS),
    **dict.fromkeys(("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"), _LAYERS),
    **dict.fromkeys(("stage3_allgather_sequential", "allgather_sequential"), _LAYERS),
    "save_muon_momentum_buffer_in_memory": "set optim.name",
}
"""Key -> what to do instead, or why it cannot be set."""

REUSE_DISTANCE = "stage3_max_reuse_distance"
LIVE_PARAMETERS = "stage3_max_live_parameters"
PREFETCH_BUCKET = "stage3_prefetch_bucket_size"
SUB_GROUP = "sub_group_size"
HPZ = "zero_hpz_partition_size"
DEFAULTS = {REUSE_DISTANCE: 10**9, LIVE_PARAMETERS: 10**9, SUB_GROUP: 10**9}
"""DeepSpeed's defaults in elements of the keys that determine memory; the engine chooses the prefetch bucket."""


def needs_stage_3(key: str) -> bool:
    """True if DeepSpeed reads the key at stage 3 only."""
    return key.startswith("stage3_") or key in (SUB_GROUP, HPZ)
