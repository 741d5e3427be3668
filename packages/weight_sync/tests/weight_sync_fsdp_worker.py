"""One rank of an FSDP2 job on the CPU: ModuleSource must send the full tensors. Run by test_weight_sync_sources.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from plinth_testing import run_ranks
from weight_sync import ModuleSource, plan_buckets
from weight_sync.tensors import slot_view


def main(rank: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    reference = {name: param.detach().clone() for name, param in module.named_parameters()}
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    assert any(hasattr(param, "full_tensor") for param in module.parameters())
    source = ModuleSource(module)
    seen = set()
    for bucket in plan_buckets(source.manifest(), 600).buckets:
        out = torch.zeros(bucket.nbytes, dtype=torch.uint8) if rank == 0 else None
        source.fill(bucket, out)
        for slot in bucket.slots if out is not None else ():
            assert torch.equal(slot_view(out, slot), reference[slot.name]), slot.name
            seen.add(slot.name)
    assert rank or seen == set(reference)
    dist.barrier()  # gloo's threads end badly on a rank whose peer has left
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(main)
