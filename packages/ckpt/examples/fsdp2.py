"""An FSDP2 model that rank 0 saves whole and any number of ranks resumes.

    python packages/ckpt/examples/fsdp2.py RUN_FOLDER --ranks 2 --steps 4
    python packages/ckpt/examples/fsdp2.py RUN_FOLDER --ranks 1 --steps 8      # resumes with another number of ranks

Runs on the CPU over gloo; on GPUs change the device type and the backend. Rank 0's host memory holds the whole state
while it is written. The step pays for the gathering and one copy; writing runs in the background.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import AsyncSaver, Checkpoint, CheckpointManager, load_state_dict


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, manager: CheckpointManager, rank: int) -> int:
    """Load the newest good checkpoint on rank 0 and scatter it. Returns its step, 0 without one."""
    newest: Checkpoint | None = manager.newest_good() if rank == 0 else None
    step = [newest.step if newest is not None else 0]
    dist.broadcast_object_list(step)
    if step[0] == 0:
        return 0
    state = load_state_dict(newest.path / "train.safetensors") if newest is not None else {"model": {}, "optimizer": {}}
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    return step[0]


def train(rank: int, num_ranks: int, store: str, folder: Path, num_steps: int) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 16))
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    manager = CheckpointManager(folder / "checkpoints", keep_last=2)
    first = resume(model, optimizer, manager, rank) + 1
    saver = AsyncSaver(manager)
    for step in range(first, num_steps + 1):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))  # the same on every rank
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # A collective: every rank gathers, rank 0 holds the result.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
            saver.save(
                step, {"train": {"model": model_state, "optimizer": optimizer_state}}, state={"ranks": num_ranks}
            )
    saver.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/store", options.run_folder, options.steps)
        if options.ranks == 1:
            train(0, *arguments)
        else:
            mp.spawn(train, args=arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
