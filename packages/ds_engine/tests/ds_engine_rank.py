"""Serves the functions of the worker modules to rank pools (plinth_testing.RankPool)."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ds_engine_collective_worker
import ds_engine_gradient_worker
import ds_engine_upstream_worker
import ds_engine_worker
import peft  # noqa: F401
import torch._dynamo
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import ds_engine
from plinth_testing import serve_ranks

if __name__ == "__main__":
    serve_ranks(
        (ds_engine_worker, ds_engine_gradient_worker, ds_engine_collective_worker, ds_engine_upstream_worker),
        join=partial(ds_engine.init_distributed, device=torch.device("cpu"), timeout_s=300.0),
        leave=ds_engine.shutdown_distributed,
        passed_on=(ds_engine.EngineError,),
    )
