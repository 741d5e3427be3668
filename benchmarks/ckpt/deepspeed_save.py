"""Measures how long a background save of DeepSpeed's checkpoint blocks several ranks, compared with a foreground save.

    python -m benchmarks.ckpt.deepspeed_save [--folder DIR] [--ranks 2] [--stage 2] [--millions 50] [--repeats 5]
        [--device cpu|cuda]

Every rank trains linear layers of `--millions` parameters in total with AdamW under ZeRO. Each round saves twice: in
the foreground (prepare, DeepSpeed's save_checkpoint on every rank, publish, which hashes and fsyncs every file) and in
the background (AsyncSaver with DeepSpeedState). Prints one line per round and the medians. Times are those of the
slowest rank:

    save_s    foreground save until it is published
    stall_s   call that starts a background save
    whole_s   background save until it is published
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WIDTH = 1024


def build(options: argparse.Namespace) -> Any:
    """A DeepSpeed engine that has trained one step, so the optimizer has a state."""
    import deepspeed
    import torch

    # Not needed; a compiler that is killed leaves a lock for which every later process waits indefinitely.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if options.device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(0)
    num_layers = max(1, round(options.millions * 1e6 / _WIDTH**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.randn(1, _WIDTH, device=engine.device).bfloat16()).float().square().mean())
    engine.step()
    return engine


def measure(options: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from ckpt import AsyncSaver, CheckpointManager, DeepSpeedState, SaverRanks

    rank = int(os.environ["RANK"])
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    engine = build(options)
    manager = CheckpointManager(options.folder / "checkpoints")
    actor = DeepSpeedState(engine, lambda folder: engine.save_checkpoint(folder, tag="actor"))

    def save(step: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        if rank == 0:
            manager.prepare(step)
        dist.barrier()
        engine.save_checkpoint(str(options.folder / "checkpoints" / f".partial_step_{step:08d}" / "actor"), tag="actor")
        dist.barrier()
        if rank == 0:
            manager.publish(step, state={})
        dist.barrier()
        return time.perf_counter() - started

    rounds = []
    ranks = SaverRanks(num_ranks=options.ranks, rank=rank, run_id="benchmark")
    with AsyncSaver(manager, ranks=ranks) as saver:
        saver.save(0, {"actor": actor})  # untimed: the first copy allocates the host memory, which later ones reuse
        saver.wait()
        for step in range(1, 2 * options.repeats, 2):
            save_s = save(step)
            dist.barrier()
            started = time.perf_counter()
            stall_s = saver.save(step + 1, {"actor": actor}, copy_in_background=bool(options.background_copy))
            saver.wait()
            row = torch.tensor([save_s, stall_s, time.perf_counter() - started], device=engine.device)
            dist.all_reduce(row, op=dist.ReduceOp.MAX)
            rounds.append(row.tolist())
            if rank == 0:
                save_s, stall_s, whole_s = rounds[-1]
                num_bytes = manager.manifest(step + 1).num_bytes
                shares = f"{stall_s / save_s:.3f}"
                print(
                    f"{step // 2 + 1}\t{num_bytes / 1e6:.0f}\t{save_s:.3f}\t{stall_s:.4f}\t{whole_s:.3f}\t{shares}",
                    flush=True,
                )
                for old in manager.steps()[:-1]:
                    shutil.rmtree(manager.root / f"step_{old:08d}")
    if rank == 0:
        print(f"median stall_over_save {statistics.median(stall / save for save, stall, _ in rounds):.3f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--background-copy", type=int, default=0, choices=(0, 1), help="1: copy_in_background")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--millions", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    print("round\tmb\tsave_s\tstall_s\twhole_s\tstall_over_save", flush=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    launch += ["--local-ranks-filter=0", "-m", "benchmarks.ckpt.deepspeed_save", *sys.argv[1:]]
    accelerator = {"DS_ACCELERATOR": "cpu"} if options.device == "cpu" else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        sys.exit(subprocess.run([*launch, f"--folder={name}"], env=os.environ | accelerator, check=False).returncode)


if __name__ == "__main__":
    main()
