"""Log-probs of sampled responses by an engine of one rank, packed as in training. Run by test_real_model.py.

real_model_worker.py MODEL SAMPLES.json DTYPE    SAMPLES.json: [[prompt ids, response ids], ...]
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu"}

import torch

from ds_engine import (
    EngineConfig,
    OptimConfig,
    SimpleBatch,
    ZeroConfig,
    ZeroEngine,
    init_distributed,
    shutdown_distributed,
)
from plinth_testing import free_port
from rl_core import linear_log_prob

if __name__ == "__main__":
    folder, samples, dtype = sys.argv[1:]
    cpu = torch.device("cpu")
    init_distributed(0, 1, "127.0.0.1", free_port(), cpu)
    config = EngineConfig(dtype=dtype, zero=ZeroConfig(stage=2), optim=OptimConfig(lr=1e-5))  # type: ignore[arg-type]
    engine = ZeroEngine.from_pretrained(folder, config, log_prob_fn=linear_log_prob, device=cpu, trainable=False)
    sequences = json.loads(Path(samples).read_text())
    [output] = engine.log_probs([SimpleBatch.pack(sequences)])
    rows = output.log_probs_K.split([len(response) for _, response in sequences])
    print("log-probs", json.dumps([row.tolist() for row in rows]))
    shutdown_distributed()
