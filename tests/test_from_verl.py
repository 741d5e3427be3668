"""docs/from-verl.md: it lists every key of the required documents, and everything that it names here exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.bench.config import SixCaseConfig, StageGateConfig
from apps.evaluate.config import EvaluateConfig
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from apps.sft.config import SftConfig
from run_kit import load_config
from run_kit.config.schema import all_paths

REPO = Path(__file__).resolve().parents[1]
DOCUMENT = REPO / "docs" / "from-verl.md"
APPS: dict[str, type] = {"ppo": PpoConfig, "grpo": GrpoConfig, "sft": SftConfig, "evaluate": EvaluateConfig}
BENCHMARKS: dict[str, type] = {"six_case": SixCaseConfig, "stage_gate": StageGateConfig}

# What the documents name, by document; they are not part of the repository.
NAMED = """
VERL_ENABLE_PARAM_OFFLOAD VERL_DS_ZERO2_FP32_ACCUM_PATCH VERL_DS_ZERO2_STEP_EACH_MICRO DATA_TRAIN DATA_VAL
CUDA_VISIBLE_DEVICES
actor@actor_rollout_ref.actor critic actor_rollout_ref.actor.strategy trainer.use_legacy_worker_impl
actor_rollout_ref.rollout.name actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.load_format
actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.max_model_len
actor_rollout_ref.rollout.max_num_seqs actor_rollout_ref.rollout.max_num_batched_tokens
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.gpu_memory_utilization
actor_rollout_ref.rollout.n actor_rollout_ref.model.path critic.model.path actor_rollout_ref.model.trust_remote_code
critic.model.trust_remote_code actor_rollout_ref.model.enable_gradient_checkpointing
actor_rollout_ref.model.use_remove_padding actor_rollout_ref.actor.ppo_mini_batch_size critic.ppo_mini_batch_size
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu critic.ppo_micro_batch_size_per_gpu
actor_rollout_ref.actor.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu actor_rollout_ref.actor.use_kl_loss
actor_rollout_ref.actor.deepspeed.zero_stage actor_rollout_ref.actor.deepspeed.offload
critic.deepspeed_config.zero_stage critic.deepspeed_config.offload critic.enable
algorithm.use_kl_in_reward algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.gamma algorithm.lam
algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon
algorithm.kl_penalty actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.loss_agg_mode
actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high actor_rollout_ref.actor.clip_ratio_c
actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.ppo_epochs critic.ppo_epochs critic.cliprange_value
trainer.critic_warmup algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches
reward_model.overlong_buffer reward_model.reward_kwargs.overlong_buffer_cfg
algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold
algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.bypass_mode
actor_rollout_ref.actor.tis_imp_ratio_cap
custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path
reward_model.reward_manager reward_model.enable reward_model.model.path reward_funcs reward_weights
actor_rollout_ref.rollout.multi_turn.tool_config_path actor_rollout_ref.rollout.multi_turn.max_assistant_turns
reward.reward_kwargs.method reward.reward_kwargs.format_score reward.reward_kwargs.score reward.num_workers
data.train_files data.val_files data.train_batch_size data.max_prompt_length data.max_response_length
data.trust_remote_code data.filter_overlong_prompts data.prompt_key data.apply_chat_template_kwargs
trainer.n_gpus_per_node trainer.nnodes trainer.save_freq trainer.test_freq trainer.val_before_train
trainer.total_training_steps trainer.logger trainer.experiment_name
zero1_no_offload zero2_no_offload zero3_no_offload zero1_cpu_offload zero2_cpu_offload zero3_cpu_offload grpo_fix_60

actor_rollout_ref.actor.ulysses_sequence_parallel_size critic.ulysses_sequence_parallel_size
ulysses_sequence_parallel_size lora_rank max_lora_rank --enable_lora max_new_tokens temp gpu_memory_utilization

SEED STEPS RUN_TAG SEEDS ZERO2_STEP_EACH_MICRO run_ds_zero_six_case_bench.sh run_ds_zero12_seed_gate_bench.sh
summary.tsv compare.tsv overall.tsv train.log

distributed_type num_processes mixed_precision zero_stage offload_optimizer_device offload_param_device
gradient_accumulation_steps gradient_clipping zero3_init_flag zero3_save_16bit_model per_device_train_batch_size
per_device_eval_batch_size num_generations max_completion_length stage3_max_live_parameters
stage3_max_reuse_distance overlap_comm reduce_bucket_size deepspeed_multinode_launcher NCCL_DEBUG --config_file
--model_path submit_preprocessing_deepseek.slurm submit_sft_deepseek.slurm submit_grpo_deepseek.slurm train_sft.py
train_grpo.py evaluate_model.py

critic/score/mean perf/throughput perf/max_memory_reserved_gb timing_s/step actor/skipped_inactive_micro
"""


def rows() -> list[tuple[str, str, str]]:
    """The three cells of every row of every table."""
    lines = [
        line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and not line.startswith("| ---")
    ]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return [(row[0], row[1], row[2]) for row in cells if row[0] != "theirs"]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def ours() -> Iterator[str]:
    for _, here, _ in rows():
        found = code(here)
        assert found or here == "—", here
        yield from found


def test_everything_the_documents_name_has_a_row() -> None:
    theirs = [name for row in rows() for name in code(row[0])]
    assert [name for name in NAMED.split() if name not in theirs] == []
    assert len(set(theirs)) == len(theirs), "a name has two rows"


def loads(config: type, *arguments: str, app: str = "") -> None:
    named = [argument.partition("=") for argument in arguments]
    presets = REPO / "apps" / app / "presets"
    files = [presets / f"{value}.yaml" for key, _, value in named if key == "preset"]
    files += [presets / "overlays" / f"{value}.yaml" for key, _, value in named if key == "overlay"]
    values = [argument for argument in arguments if argument.partition("=")[0] not in ("preset", "overlay")]
    load_config(config, presets=files, overrides=values)


@pytest.mark.parametrize("text", sorted({text for text in ours() if text.startswith("python -m")}))
def test_commands_load(text: str) -> None:
    module, *arguments = text.removeprefix("python -m ").split()
    app = module.split(".")[1]
    if app == "bench":
        loads(BENCHMARKS[arguments[0]], *arguments[1:])
    else:
        loads(APPS[app], *arguments, app=app)


def test_named_keys_exist_and_accept_the_values_shown() -> None:
    keys = [text for text in ours() if not text.startswith(("python -m", "plinth "))]
    known = set(all_paths(PpoConfig))
    assert [text for text in keys if text.partition("=")[0] not in known] == []
    values = dict.fromkeys(text for text in keys if "=" in text)
    del values["reward.model=FOLDER"]  # excludes reward.function
    loads(PpoConfig, *values)
    loads(PpoConfig, "reward.model=FOLDER")


def test_keys_mentioned_in_passing_exist() -> None:
    known = set(all_paths(PpoConfig))
    sections = {path.partition(".")[0] for path in known if "." in path}
    passing = [text.partition("=")[0] for _, _, words in rows() for text in code(words)]
    assert [key for key in passing if "." in key and key.partition(".")[0] in sections and key not in known] == []
