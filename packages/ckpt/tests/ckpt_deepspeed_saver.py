"""Run on every rank by test_ckpt_deepspeed: trains a tiny tied Qwen3 under DeepSpeed and saves checkpoints.

    ckpt_deepspeed_saver.py RANK WORLD_SIZE STORE MODEL OUT STAGE...

For each stage writes OUT/zero<stage>/actor, as DeepSpeed's save_checkpoint does, and OUT/zero<stage>.expected.pt: the
weights that DeepSpeed itself consolidates out of it.
"""

import os
import sys
from pathlib import Path

rank, world_size = int(sys.argv[1]), int(sys.argv[2])
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": "0",
    "WORLD_SIZE": str(world_size),
    "DS_ACCELERATOR": "cpu",
    "MASTER_ADDR": "127.0.0.1",
}

import deepspeed  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402


def save(stage: int, model_path: str, out: Path) -> None:
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(sys.argv[3], world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # Not needed, and a compiler that is killed half-way leaves a lock that every later process waits for without end.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    for stage in map(int, sys.argv[6:]):
        save(stage, sys.argv[4], Path(sys.argv[5]))
    torch.distributed.destroy_process_group()
