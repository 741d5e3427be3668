"""Push weights from FSDP2 (fully_shard) into a running vLLM server.

    torchrun --nproc-per-node 2 push_fsdp2.py MODEL_FOLDER http://127.0.0.1:8000

The server serves MODEL_FOLDER (see the README for its flags). Every rank calls push; rank 0 controls the server.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weight_sync import Endpoint, ModuleSource, WeightPusher


def main() -> None:
    """Train one step on all ranks and push."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("url")
    parser.add_argument("--api-key")
    parser.add_argument("--save", help="write the trained model into this folder")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(2, 34, device=device)[None] + rank
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with WeightPusher(ModuleSource(model), [Endpoint(args.url, args.api_key)], rank=rank, device=device) as pusher:
        report = pusher.push(version=1)
    if rank == 0:
        print(f"version {report.version}: {report.num_bytes} bytes in {1000 * report.total_s:.0f} ms")
    if args.save:
        weights = {name: param.full_tensor().cpu() for name, param in model.named_parameters()}
        if rank == 0:
            torch.save(weights, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
