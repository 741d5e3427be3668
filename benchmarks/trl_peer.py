"""Common parts of the scripts that run TRL: clock, arguments and settings; and how an app runs beside it."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import Run, visible_gpus


def step_clock(*, on_gpu: bool, updates: int = 1) -> Any:
    """A `TrainerCallback` that prints the seconds of each step of so many updates, and the memory reserved by torch."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % updates == 0:
                now = time.perf_counter()
                peak = torch.cuda.max_memory_reserved() / 1e9 if on_gpu else 0.0
                number = state.global_step // updates
                print(f"trl step {number}: {now - self.last:.2f} s, {peak:.1f} GB reserved", flush=True)
                self.last = now

    return Clock()


def parser(description: str | None, *, steps: int, cpu: str) -> argparse.ArgumentParser:
    """The arguments of every such script: the workload's folder, the number of steps, and a trial on the CPU."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--cpu", action="store_true", help=cpu)
    return made


def settings(folder: Path, *, max_steps: int, per_forward: int, batch_size: int, cpu: bool) -> dict[str, Any]:
    """Arguments of every config of TRL: sizes, and no checkpoints, trackers and bars."""
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": max_steps,
        "per_device_train_batch_size": per_forward,
        "gradient_accumulation_steps": batch_size // per_forward // int(os.environ.get("WORLD_SIZE", "1")),
        "bf16": not cpu,
        "use_cpu": cpu,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def add_arguments(made: argparse.ArgumentParser) -> None:
    """The arguments of a script that compares an app with TRL."""
    made.add_argument("--peer", choices=("trl", "none"), default="trl")
    made.add_argument("--peer-args", default="", help="further arguments of trl_step.py, such as '--per-forward 16'")
    made.add_argument("--one-gpu", action="store_true", help="one after the other on the first GPU")


def peer(module: str, folder: Path, args: argparse.Namespace, *more: str, launcher: Sequence[str] = ()) -> Run:
    """TRL on the second GPU, with `--one-gpu` on the first, or with a launcher on the first `--ranks`."""
    command = [sys.executable, *launcher, "-m", module, str(folder), f"--steps={args.steps}", *more]
    gpus = visible_gpus(args.ranks) if launcher else visible_gpus(1, first=int(not args.one_gpu))
    return Run("trl", [*command, *args.peer_args.split()], folder / "trl.log", gpus)


def run_beside(apps: Sequence[Run], trl: Run | None, args: argparse.Namespace) -> list[int]:
    """Runs the apps one after the other, TRL at the same time or after them, prints what each said; exit codes."""
    codes = []
    if trl and not args.one_gpu:
        trl.start()
    for run in [*apps, *([trl] if trl else [])]:
        if run is not trl or args.one_gpu:
            run.start()
        codes.append(run.end(args.timeout))
        print(run.report(codes[-1]), flush=True)
    return codes
