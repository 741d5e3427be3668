"""What the scripts that run TRL share: their clock and their arguments."""

import argparse
import time
from pathlib import Path
from typing import Any


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
