"""SFT and GRPO of a 7B configuration on GPUs of which all but some GiB are taken, as on small cards.

`python -m benchmarks.small_cards.run FOLDER [key=value ...] [--gib 11] [--gpus 2] [--parts sft grpo]` writes
DeepSeek-R1-Distill-Qwen-7B's configuration with random weights, takes the rest of each GPU's memory in a process of its
own, runs the two presets for such cards, and prints seconds a step, the peak of a GPU as NVML counts it, and by how
much log-probs of servers and ranks differ. Servers need bitsandbytes. `--gib 0` takes nothing. Further keys go to the
apps.
"""

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.runs import PeakMemory, Steps, app, leave, parser, run_folder, visible_gpus
from benchmarks.sft_step.workload import write_workload as write_demonstrations

PRESETS = {"sft": "deepseek_r1_distill_qwen_7b_sft", "grpo": "deepseek_r1_distill_qwen_7b_grpo"}
PROMPT_TOKENS = 1500


def keys(folder: Path, part: str, steps: int, num_gpus: int) -> list[str]:
    """The preset; the other keys say what is trained and for how long, and tune nothing."""
    own = {
        "sft": [
            f"supervised.files={folder}/train.parquet",
            f"supervised.steps={steps}",
            "supervised.optim.warmup_steps=0",
        ],
        "grpo": [
            f"data.train={folder}/prompts.parquet",
            "reward={function: 'benchmarks.grpo_step.workload:parity'}",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.val_after_train=false",
            f"rollout.tensor_parallel_size={num_gpus}",
        ],
    }[part]
    return [f"preset={PRESETS[part]}", f"model.path={folder}/model", f"trainer.num_ranks={num_gpus}", *own]


def take(gpu: int, free_gib: float) -> list[Any]:
    """Allocates memory of a GPU until `free_gib` are left; the blocks."""
    import torch

    blocks, target = [], int(free_gib * 2**30)
    while (excess := torch.cuda.mem_get_info(gpu)[0] - target) > 2**21:  # the driver's unit is 2 MiB
        blocks.append(torch.empty(excess, dtype=torch.uint8, device=f"cuda:{gpu}"))
    return blocks


def hold(gpu: int, free_gib: float, pipe: Connection) -> None:
    """Takes memory of a GPU, says so, and keeps it until the process at the other end closes the pipe or ends."""
    blocks = take(gpu, free_gib)  # noqa: F841  (a name keeps them)
    pipe.send(True)
    pipe.poll(None)


@contextlib.contextmanager
def ballast(num_gpus: int, free_gib: float) -> Iterator[None]:
    """Leaves `free_gib` free on the first GPUs while it is entered; 0: takes nothing."""
    if not free_gib:
        yield
        return
    context, holders, pipes = get_context("spawn"), [], []
    try:
        for gpu in range(num_gpus):
            ours, theirs = context.Pipe()
            holder = context.Process(target=hold, args=(gpu, free_gib, theirs))
            holder.start()
            holders.append(holder)
            pipes.append(ours)
            theirs.close()  # so that the end of the holder ends the wait for it
        num_held = 0
        with contextlib.suppress(EOFError):
            for ours in pipes:
                num_held += ours.poll(120) and ours.recv()
        if num_held < num_gpus:
            raise RuntimeError(f"could not leave {free_gib} GiB free on {num_gpus} GPUs")
        yield
    finally:
        # Not with an Event: its `set` waits until every holder wakes, also for one that the SIGTERM of `timeout` ended.
        for holder in holders:
            holder.kill()
        for holder in holders:
            holder.join()


def write_prompts(folder: Path, number: int) -> None:
    """Texts of `PROMPT_TOKENS` bytes, one token each."""
    import pyarrow
    import pyarrow.parquet

    texts = [f"{index} ".ljust(PROMPT_TOKENS, "abcdefgh "[index % 9]) for index in range(number)]
    pyarrow.parquet.write_table(pyarrow.table({"question": texts}), folder / "prompts.parquet")


def medians(folder: Path, part: str) -> str:
    """Seconds of each phase and mismatch of log-probs after the first step of the newest run (with one step, of it)."""
    steps = Steps(run_folder(folder, part))
    names = [name for name in (steps.table.columns if steps.table else ()) if name.startswith("timing_s/")]
    measured = [f"{name[9:]} {seconds:.1f} s" for name in names if (seconds := steps.median(name)) >= 0.05]
    mismatch = steps.median("rollout/log_prob_mismatch")
    return ", ".join([*measured, *([] if math.isnan(mismatch) else [f"mismatch of log-probs {mismatch:.2g}"])])


def measure(folder: Path, part: str, args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs one app beside the ballast and prints what it took; its exit code."""
    gpus = visible_gpus(args.gpus)
    run = app(folder, part, gpus, [*keys(folder, part, args.steps, args.gpus), *extra], kind=part)
    with ballast(args.gpus, args.gib):
        with PeakMemory(gpus) as before:
            pass
        run.start()
        code = run.end(args.timeout)
    held = max(map(float.__sub__, run.peaks_gib, before.gib), default=0.0)
    print(f"{run.report(code)}\nthe fullest GPU held {held:.1f} GiB beside the ballast")
    print(medians(folder, part), flush=True)
    return code


def main() -> None:
    """Runs the parts one after the other."""
    arguments = parser(__doc__, model="qwen2-7b", steps=3, timeout_s=900.0)
    arguments.add_argument("--gib", type=float, default=11.0, help="left free on each GPU")
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--parts", nargs="+", choices=sorted(PRESETS), default=list(PRESETS))
    args, extra = arguments.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    write_demonstrations(args.folder, model=args.model, num_steps=args.steps)
    write_prompts(args.folder, 16 * args.steps)
    leave([measure(args.folder, part, args, extra) for part in args.parts])


if __name__ == "__main__":
    main()
