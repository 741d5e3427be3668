"""ds_engine in a training loop of your own, on micro batches of unequal size.

    python examples/ds_engine_own_loop.py

What it buys: the gradient of a step is that of the whole mini batch, however it is split, at every ZeRO stage. With
DeepSpeed alone, several `backward()` calls before one `step()` lose gradients at stages 1 and 2 unless the loop marks
the boundaries of accumulation, and no warning says so. The script takes one step on four sequences in three micro
batches, with plain torch, with DeepSpeed alone and with the engine, and prints the gradient norms.

Measured with this command (DeepSpeed 0.19.8, float32): the norm is 8.871987 in plain torch and with the engine at
stages 1, 2 and 3. DeepSpeed alone gives 3.650834 at stages 1 and 2, the last micro batch only, and 8.871988 at stage 3.
"""

import argparse
import copy
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_engine import (
    EngineConfig,
    LossOutput,
    OptimConfig,
    SimpleBatch,
    TokenBatch,
    TokenOutputs,
    ZeroConfig,
    ZeroEngine,
    dense_log_prob,
    init_distributed,
    shutdown_distributed,
)
from plinth_testing import free_port, random_model, tiny_config

SEQUENCES = [([1, 2, 3], [4, 5]), ([6, 7], [8, 9, 10, 11]), ([12], [13, 14, 15]), ([16, 17], [18, 19])]
MICRO_BATCHES = [SEQUENCES[:2], SEQUENCES[2:3], SEQUENCES[3:]]
NUM_TARGETS = sum(len(response) for _, response in SEQUENCES)


def plain_loss(model: PreTrainedModel, sequences: list[tuple[list[int], list[int]]]) -> Tensor:
    """These sequences' share of the mean loss per response token."""
    total = torch.zeros(())
    for prompt, response in sequences:
        ids = torch.tensor([prompt + response])
        log_probs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total = total - log_probs.gather(-1, ids[0, len(prompt) :, None]).sum()
    return total / NUM_TARGETS


def torch_norm(model: PreTrainedModel) -> float:
    """The true gradient norm, from one backward pass over everything."""
    model = copy.deepcopy(model)
    plain_loss(model, SEQUENCES).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def deepspeed_norm(model: PreTrainedModel, stage: int) -> float:
    """DeepSpeed alone: one backward pass per micro batch, then a step."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
    }
    engine: Any = deepspeed.initialize(model=copy.deepcopy(model), config=settings)[0]
    for sequences in MICRO_BATCHES:
        engine.backward(plain_loss(engine, sequences))
    engine.step()
    return float(engine.get_global_grad_norm())


def loss(out: TokenOutputs, batch: TokenBatch) -> LossOutput:
    """The micro batch's share of the mini batch's loss; any loss on log-probs goes here."""
    return LossOutput(loss=-out.log_probs_K.sum() / NUM_TARGETS)


def engine_norm(folder: Path, stage: Literal[1, 2, 3]) -> float:
    """The engine: one call per mini batch. Micro batches are packed, without padding."""
    config = EngineConfig(dtype="float32", zero=ZeroConfig(stage=stage), optim=OptimConfig(lr=1e-3))
    cpu = torch.device("cpu")
    engine = ZeroEngine.from_pretrained(str(folder), config, log_prob_fn=dense_log_prob, device=cpu)
    stats = engine.train_mini_batch([SimpleBatch.pack(sequences) for sequences in MICRO_BATCHES], loss)
    engine.close()
    return float(stats.grad_norm)


def compare() -> dict[str, float]:
    """Gradient norms by name. Joins a process group of one rank."""
    model = random_model(tiny_config(), seed=0)
    init_distributed(0, 1, "127.0.0.1", free_port(), torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        norms = {"plain torch, one backward pass": torch_norm(model)}
        stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
        for stage in stages:
            norms[f"DeepSpeed alone, ZeRO-{stage}"] = deepspeed_norm(model, stage)
            norms[f"ds_engine, ZeRO-{stage}"] = engine_norm(Path(folder), stage)
    shutdown_distributed()
    return norms


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, norm in compare().items():
        print(f"{name:32s} gradient norm {norm:.6f}")


if __name__ == "__main__":
    main()
