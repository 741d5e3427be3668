"""DeepSpeed's expert parallelism (AutoEP) on two gloo ranks against one process: loss and gradient norm of one step.

`python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.mixtures.expert_parallel --stage 2 [--given]` trains a
small Qwen3-MoE with DeepSpeed's own SGD, or, as the engine does, with an optimizer that is given to DeepSpeed.
"""

import argparse
import os
from copy import deepcopy
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.random_model import model_config
from ds_engine import init_distributed

LR = 0.1


def loss_of(model: Any, ids_SL: Tensor) -> Tensor:
    """Mean negative log-prob of the next tokens."""
    log_p_SLV = model(input_ids=ids_SL, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss: Tensor = -log_p_SLV.gather(2, ids_SL[:, 1:, None]).mean()
    return loss


def main() -> None:
    """Prints both on rank 0."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--given", action="store_true")
    args = parser.parse_args()
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    init_distributed(rank, 2, address, port + 1, torch.device("cpu"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config("qwen3-moe-tiny", initializer_range=0.2))
    expected = deepcopy(model)
    ids_SL = torch.randint(0, 512, (2, 12))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe"},
    }
    if not args.given:
        settings["optimizer"] = {"type": "SGD", "params": {"lr": LR}}
    given = torch.optim.SGD(model.parameters(), lr=LR) if args.given else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=given, model_parameters=model.parameters(), config=settings
    )
    loss = loss_of(engine, ids_SL[rank : rank + 1])
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    loss_of(expected, ids_SL).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), float("inf"))
    if rank == 0:
        print(f"AutoEP: loss {mean / 2:.6f}, gradient norm {engine.get_global_grad_norm():.6f}")
        print(f"one process: loss {loss_of(expected, ids_SL):.6f}, gradient norm {norm:.6f}", flush=True)


if __name__ == "__main__":
    main()
