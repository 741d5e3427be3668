"""SFT and GRPO of a 7B configuration on GPUs of which all but some GiB are taken, as on small cards.

`python -m benchmarks.small_cards.run FOLDER [key=value ...] [--gib 11] [--gpus 2] [--parts sft grpo]` writes
DeepSeek-R1-Distill-Qwen-7B's configuration with random weights, takes the rest of each GPU's memory in a process of its
own, runs the two presets for such cards, and prints seconds a step and the peak of a GPU as NVML counts it. Servers
need bitsandbytes. `--gib 0` takes nothing. Further keys go to the apps.
"""

import argparse
import contextlib
import csv
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.grpo_step.compare import Run
from benchmarks.memory_turns.run import PeakMemory
from benchmarks.random_model import CONFIGS
from benchmarks.sft_step.workload import write_workload as write_demonstrations

PRESETS = {"sft": "deepseek_r1_distill_qwen_7b_sft", "grpo": "deepseek_r1_distill_qwen_7b_grpo"}
PROMPT_TOKENS = 1500


def command(folder: Path, part: str, steps: int, num_gpus: int, extra: Sequence[str]) -> list[str]:
    """An app with its preset; the other keys say what is trained and for how long, and tune nothing."""
    keys = {
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
    common = [f"model.path={folder}/model", f"trainer.num_ranks={num_gpus}", f"trainer.output_dir={folder}/outputs"]
    common += [f"trainer.experiment={part}", "trainer.export_model=false"]
    return [sys.executable, "-m", f"apps.{part}.main", f"preset={PRESETS[part]}", *common, *keys, *extra]


def hold(gpu: int, free_gib: float, held: Any, done: Any) -> None:
    """Allocates memory of a GPU until `free_gib` are left, and keeps it until `done`."""
    import torch

    blocks, target = [], int(free_gib * 2**30)
    while (excess := torch.cuda.mem_get_info(gpu)[0] - target) > 2**21:  # the driver's unit is 2 MiB
        blocks.append(torch.empty(excess, dtype=torch.uint8, device=f"cuda:{gpu}"))
    held.set()
    done.wait()


@contextlib.contextmanager
def ballast(num_gpus: int, free_gib: float) -> Iterator[None]:
    """Leaves `free_gib` free on the first GPUs while it is entered; 0: takes nothing."""
    if not free_gib:
        yield
        return
    context = get_context("spawn")
    done, held = context.Event(), [context.Event() for _ in range(num_gpus)]
    holders = [context.Process(target=hold, args=(gpu, free_gib, held[gpu], done)) for gpu in range(num_gpus)]
    try:
        for holder in holders:
            holder.start()
        if not all(event.wait(120) for event in held):
            raise RuntimeError(f"could not leave {free_gib} GiB free on {num_gpus} GPUs")
        yield
    finally:
        done.set()
        for holder in holders:
            holder.join()


def write_prompts(folder: Path, number: int) -> None:
    """Texts of `PROMPT_TOKENS` bytes, one token each."""
    import pyarrow
    import pyarrow.parquet

    texts = [f"{index} ".ljust(PROMPT_TOKENS, "abcdefgh "[index % 9]) for index in range(number)]
    pyarrow.parquet.write_table(pyarrow.table({"question": texts}), folder / "prompts.parquet")


def phases(folder: Path, part: str) -> Mapping[str, float]:
    """Median seconds of each phase of the newest run, after its first step; with one step, of that."""
    newest = max(folder.glob(f"outputs/{part}_*/metrics.tsv"), default=None)
    rows = list(csv.DictReader(newest.open(), delimiter="\t")) if newest else []
    names = [name for name in (rows[0] if rows else {}) if name.startswith("timing_s/")]
    later = rows[1:] or rows
    return {name[9:]: statistics.median(float(row[name] or "nan") for row in later) for name in names}


def measure(folder: Path, part: str, args: argparse.Namespace, extra: Sequence[str]) -> None:
    """Runs one app beside the ballast and prints what it took."""
    gpus = ",".join(map(str, range(args.gpus)))
    run = Run(part, command(folder, part, args.steps, args.gpus, extra), folder / f"{part}.log", gpus)
    with ballast(args.gpus, args.gib):
        with PeakMemory(args.gpus) as before:
            pass
        with PeakMemory(args.gpus) as peak:
            run.start()
            code = run.end(args.timeout)
    text = run.log.read_text(errors="replace")
    print(f"\n## {part}: exit code {code}; the fullest GPU held {peak.gib - before.gib:.1f} GiB beside the ballast")
    print("\n".join(re.findall(r"^(?:chosen for|memory of|ready after).*", text, re.MULTILINE)))
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases(folder, part).items() if seconds >= 0.05))
    if code:
        print("\n".join(text.splitlines()[-15:]))


def main() -> None:
    """Runs the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen2-7b")
    parser.add_argument("--gib", type=float, default=11.0, help="left free on each GPU")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=sorted(PRESETS), default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one run")
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_demonstrations(folder, model=args.model, num_steps=args.steps)
    write_prompts(folder, 16 * args.steps)
    for part in args.parts:
        measure(folder, part, args, extra)


if __name__ == "__main__":
    main()
