"""Names of settings in TRL, verl, OpenRLHF and accelerate, for the hint of an unknown key."""

_THEIRS = {
    "model.path": "model_name_or_path model_id pretrain",
    "data.train": "train_dataset train_files prompt_data dataset_name dataset",
    "data.val": "eval_dataset val_files eval_data",
    "supervised.files": "train_dataset train_files dataset dataset_name",
    "supervised.val_files": "eval_dataset val_files eval_data",
    "data.columns.prompt": "prompt_key input_key",
    "data.columns.ground_truth": "label_key",
    "data.max_prompt_length": "prompt_max_len max_prompt_len",
    "sampling.max_tokens": "max_completion_length max_response_length generate_max_len max_new_tokens",
    "sampling.n": "rollout.n num_generations n_samples_per_prompt num_return_sequences",
    "sampling.temperature": "rollout.temperature",
    "sampling.top_p": "rollout.top_p",
    "sampling.top_k": "rollout.top_k",
    "batch.train_batch_size": "rollout_batch_size generation_batch_size batch_size",
    "batch.mini_batch_size": "ppo_mini_batch_size gradient_accumulation_steps",
    "batch.micro_batch_size": "per_device_train_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu",
    "micro_batch_size": "per_device_train_batch_size micro_train_batch_size gradient_accumulation_steps",
    "batch.token_budget": "ppo_max_token_len_per_gpu",
    "supervised.batch_size": "batch_size train_batch_size",
    "supervised.max_length": "max_seq_length max_len",
    "supervised.epochs": "num_train_epochs max_epochs epochs",
    "algorithm.advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.kl_coef": "beta kl_beta init_kl_coef kl_loss_coef use_kl_loss",
    "algorithm.kl_kind": "kl_estimator kl_penalty kl_loss_type",
    "algorithm.clip_low": "epsilon eps_clip cliprange clip_ratio clip_ratio_low",
    "algorithm.clip_high": "epsilon_high eps_clip_low_high cliprange clip_ratio_high",
    "algorithm.kl_in": "use_kl_in_reward use_kl_loss",
    "algorithm.kl_target": "target_kl",
    "algorithm.kl_horizon": "horizon",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm.value_clip": "cliprange_value",
    "algorithm.critic_warmup_steps": "critic_warmup",
    "algorithm.overlong_filter": "mask_truncated_completions",
    "algorithm.rollout_correction.mode": "rollout_is rollout_rs vllm_importance_sampling_correction",
    "algorithm.rollout_correction.max_ratio": "rollout_is_threshold tis_imp_ratio_cap",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.lam": "lambd gae_lambda",
    "algorithm.num_epochs": "num_iterations ppo_epochs",
    "algorithm.loss_aggregation": "loss_agg_mode loss_type",
    "algorithm.loss": "loss_type loss_mode importance_sampling_level",
    "reward.function": "reward_funcs reward_fn custom_reward_function",
    "reward.batched": "reward_manager",
    "reward.terms": "reward_weights",
    "dynamic_sampling.max_rounds": "max_num_gen_batches",
    "episode.function": "rollout_func",
    "episode.tools": "tool_config_path",
    "validation.n": "num_generations_eval",
    "reward.url": "remote_rm_url",
    "reward.model": "reward_pretrain reward_model reward_model.model.path",
    "{optim}.lr": "learning_rate actor_learning_rate",
    "{optim}.schedule": "lr_scheduler_type lr_scheduler",
    "{optim}.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_ratio",
    "{optim}.grad_clip": "max_grad_norm gradient_clipping max_norm",
    "{engine}.lora.rank": "lora_rank lora_r peft_config use_peft",
    "{engine}.lora.alpha": "lora_alpha",
    "{engine}.dtype": "bf16 fp16 mixed_precision torch_dtype param_dtype",
    "{engine}.zero.stage": "zero_stage deepspeed fsdp fsdp_config strategy FULL_SHARD SHARD_GRAD_OP NO_SHARD",
    "{engine}.zero.offload.optimizer": "adam_offload optimizer_offload cpu_offload offload_optimizer_device",
    "{engine}.zero.offload.param": "param_offload",
    "{engine}.sequence_parallel": "ulysses_sequence_parallel_size ring_attn_size",
    "{engine}.gradient_checkpointing": "enable_gradient_checkpointing",
    "actor.router_replay": "router_replay.mode enable_rollout_routing_replay use_rollout_routing_replay",
    "rollout.num_servers": "vllm_num_engines",
    "rollout.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.max_lora_rank": "enable_lora",
    "rollout.extra_args": "max_num_batched_tokens",
    "rollout.urls": "vllm_server_base_url vllm_server_host",
    "trainer.num_ranks": "n_gpus_per_node num_processes nproc_per_node actor_num_gpus_per_node num_gpus gpus torchrun",
    "trainer.total_training_steps": "max_steps num_train_epochs total_epochs num_episodes steps epochs",
    "trainer.ray_address": "nnodes",
    "trainer.seed": "seed",
    "trainer.experiment": "experiment_name run_name",
    "trainer.output_dir": "default_local_dir save_path",
    "trainer.save_freq": "save_steps save_strategy",
    "trainer.test_freq": "eval_steps eval_strategy",
    "trainer.resume": "resume_from_checkpoint resume_mode load_checkpoint",
    "trainer.colocate": "vllm_mode colocate_all_models",
    "trainer.take_turns": "vllm_enable_sleep vllm_enable_sleep_mode",
    "trainer.export_model": "FSDP_STATE_DICT_TYPE",
    "tracking.rollouts_per_step": "log_completions",
    "tracking.wandb_project": "report_to use_wandb project_name logger tracking.wandb",
}
"""Our dotted key -> their names of it, with the sections that matter, and names that one guesses. `engine` and `optim`
have other places in supervised apps."""


def _by_name() -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for ours, names in _THEIRS.items():
        places = {
            ours.format(engine="actor", optim="actor.optim"),
            ours.format(engine="engine", optim="supervised.optim"),
        }
        for name in names.split():
            keys.setdefault(name, []).extend(sorted(places))
    return keys


PEER_KEYS = _by_name()
"""Their name -> our dotted keys, of which an app has some."""
