"""Serves the functions of the worker modules to two ranks (plinth_testing.RankPool)."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import peft  # noqa: F401
import rl_runtime_policy_loss_worker
import rl_runtime_reference_worker
import rl_runtime_reward_model_worker
import rl_runtime_supervised_worker
import torch._dynamo
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import ds_engine
from plinth_testing import serve_ranks

if __name__ == "__main__":
    serve_ranks(
        (
            rl_runtime_policy_loss_worker,
            rl_runtime_reference_worker,
            rl_runtime_reward_model_worker,
            rl_runtime_supervised_worker,
        ),
        join=partial(ds_engine.init_distributed, device=torch.device("cpu"), timeout_s=300.0),
        leave=ds_engine.shutdown_distributed,
    )
