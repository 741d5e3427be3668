#!/usr/bin/env bash
# GRPO steps of a real model's architecture with random weights; trainer and vLLM share the GPU(s).
#   usage: run.sh WORK_DIR [MODEL] [key=value ...]       MODEL as in benchmarks/random_model.py, default qwen3-0.6b
# Needs torch, DeepSpeed, vLLM and Ray in python3, and this repository's packages on PYTHONPATH, with weight_sync
# installed as a distribution (vLLM finds its plugin through the entry point).
set -euo pipefail
work=${1:?usage: run.sh WORK_DIR [MODEL] [key=value ...]}; shift
model=${1:-qwen3-0.6b}; [ $# = 0 ] || shift
source "$(dirname "$0")/../random_work.sh" "$work" "$model"
# Random weights never answer correctly: reward any number in the response, so that scores differ and gradients are nonzero.
python3 -m apps.grpo.main \
  trainer.experiment=grpo_"$model" trainer.total_training_steps=3 trainer.num_ranks=1 trainer.output_dir="$work/outputs" \
  trainer.val_before_train=false trainer.val_after_train=false trainer.export_model=false \
  model.path="$work/model" data.train="$work/train.parquet" \
  data.max_prompt_length=256 reward.method=flexible reward.format_score=0.5 \
  batch.train_batch_size=32 batch.mini_batch_size=16 batch.token_budget=16384 sampling.n=8 sampling.max_tokens=512 \
  actor.dtype=bfloat16 actor.zero.stage=2 actor.gradient_checkpointing=true actor.optim.lr=1e-6 \
  rollout.dtype=bfloat16 rollout.max_model_len=1024 rollout.max_num_seqs=256 rollout.gpu_memory_utilization=0.3 \
  "$@"
