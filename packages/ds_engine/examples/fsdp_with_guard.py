"""Uses the collective guard in a plain FSDP script, without DeepSpeed.

torchrun --nproc-per-node 2 fsdp_with_guard.py            trains
torchrun --nproc-per-node 2 fsdp_with_guard.py --break    rank 1 alone issues an all-reduce; both ranks raise an error
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ds_engine import CollectiveGuard, mark


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with CollectiveGuard(stall_timeout_s=30):
        for step in range(5):
            mark(f"step {step}")
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            if "--break" in sys.argv and step == 3 and dist.get_rank() == 1:
                dist.all_reduce(torch.ones(1))  # such as a grad norm on one rank only: ranks would hang
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {dist.get_rank()} step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
