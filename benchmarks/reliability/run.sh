#!/usr/bin/env bash
# PPO at ZeRO-1, 2 and 3, twenty steps each, two ranks and two vLLM servers on two GPUs, with the collective guard.
#   usage: run.sh WORK_DIR [MODEL] [bench key=value ...]
#   e.g.   run.sh /tmp/work qwen3-0.6b 'cases=["zero3_no_offload"]'
#          OVERRIDES='"trainer.device=cpu","actor.dtype=float32"' run.sh /tmp/work qwen3-tiny steps=2
# MODEL as in benchmarks/random_model.py. OVERRIDES are JSON strings with commas, appended to the overrides below.
# Needs torch, DeepSpeed, vLLM and Ray in python3, and this repository's packages on PYTHONPATH, with weight_sync
# installed as a distribution (vLLM finds its plugin through the entry point).
set -euo pipefail
work=${1:?usage: run.sh WORK_DIR [MODEL] [bench key=value ...]}; shift
model=${1:-qwen3-0.6b}; [ $# = 0 ] || shift
source "$(dirname "$0")/../random_work.sh" "$work" "$model"
# Differences from the presets: model, data and reward; 64 concurrent requests per server instead of 8.
overrides="\"model.path=$work/model\",\"data.train=$work/train.parquet\",\"data.val=[]\""
overrides+=',"reward.method=flexible","reward.format_score=0.5","rollout.max_num_seqs=64"'
overrides+=',"actor.collective_guard=auto","critic.collective_guard=auto"'
python3 -m apps.bench.main six_case run_tag=reliability output_dir="$work/outputs" steps=20 retries=0 \
  'cases=["zero1_no_offload","zero2_no_offload","zero3_no_offload"]' \
  "overrides=[$overrides${OVERRIDES:+,$OVERRIDES}]" "$@"
