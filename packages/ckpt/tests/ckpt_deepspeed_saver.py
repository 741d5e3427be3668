"""Run by test_ckpt_deepspeed: two ranks train a tiny tied Qwen3 under DeepSpeed and save checkpoints.

    ckpt_deepspeed_saver.py MODEL OUT STAGE...

For each stage writes OUT/zero<stage>/actor, as DeepSpeed's save_checkpoint does, and OUT/zero<stage>.expected.pt: the
weights that DeepSpeed itself consolidates out of it.
"""

import sys
from functools import partial
from pathlib import Path

import deepspeed
import torch
import transformers
from ckpt_ranks import run_ranks
from transformers.integrations import HfDeepSpeedConfig


def save(rank: int, stage: int, model_path: str, out: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    keep_alive = HfDeepSpeedConfig(config) if stage == 3 else None
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    model.model.norm.weight.requires_grad_(False)  # a frozen weight takes another path through the checkpoint
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    if stage == 3:
        decay = [p for p in model.parameters() if p.requires_grad and len(p.ds_shape) > 1]
        rest = [p for p in model.parameters() if p.requires_grad and len(p.ds_shape) <= 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(rank)
    for _ in range(2):
        ids = torch.randint(0, 64, (1, 8))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(out / f"zero{stage}"), tag="actor", client_state={"num_steps": 2})
    del keep_alive
    torch.distributed.barrier()
    if rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        expected = get_fp32_state_dict_from_zero_checkpoint(str(out / f"zero{stage}"), tag="actor")
        torch.save({name: tensor.clone() for name, tensor in expected.items()}, out / f"zero{stage}.expected.pt")
    torch.distributed.barrier()


def save_stages(model_path: str, out: Path, stages: list[int], rank: int) -> None:
    for stage in stages:
        save(rank, stage, model_path, out)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    run_ranks(partial(save_stages, sys.argv[1], folder, list(map(int, sys.argv[3:]))), folder)
