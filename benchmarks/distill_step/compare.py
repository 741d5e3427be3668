"""Steps of on-policy distillation, a 4B teacher and a 0.6B student: the distillation app beside TRL's trainer.

`python -m benchmarks.distill_step.compare FOLDER` runs the app on the first GPU and TRL's DistillationTrainer on the
second, at once; with `--one-gpu` one after the other, each alone on the first. `--case full --case sampled` are runs of
the app; TRL does what `full` does. Prints the table of README.md. Further `section.key=value` arguments go to the app.
"""

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.distill_step.trl_step import BATCH_SIZE
from benchmarks.grpo_step.compare import Run
from benchmarks.grpo_step.workload import NEW_TOKENS, PROMPT_TOKENS, write_prompts
from benchmarks.random_model import CONFIGS, write_random_model

CASES = {
    "full": ("teacher.on=ranks", "teacher.signal=full", "teacher.divergence=reverse"),
    "sampled": ("teacher.on=ranks", "teacher.signal=sampled"),
}
"""Name -> what the student learns from: the KL over the vocabulary, or the log-probs of its own tokens."""
PHASES = ("step", "gen", "old_log_prob", "teacher", "update_actor", "sync")


def settings(folder: Path, case: str, steps: int) -> list[str]:
    """Models, data, batch and lengths; no key tunes anything."""
    return [
        f"model.path={folder}/student",
        f"teacher.model={folder}/teacher",
        *CASES[case],
        f"data.train={folder}/train.parquet",
        f"data.max_prompt_length={PROMPT_TOKENS + 7}",
        "reward.function=benchmarks.grpo_step.workload:parity",
        f"batch.train_batch_size={BATCH_SIZE}",
        f"batch.mini_batch_size={BATCH_SIZE}",
        "sampling.n=1",
        f"sampling.max_tokens={NEW_TOKENS}",
        f"trainer.experiment={case}",
        f"trainer.output_dir={folder}/outputs",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
        "trainer.export_model=false",
    ]


def rows(folder: Path, case: str) -> list[dict[str, str]]:
    """The metrics of the case's newest run, a row a step."""
    newest = max(folder.glob(f"outputs/{case}_*/metrics.tsv"), default=None)
    return [] if newest is None else list(csv.DictReader(newest.open(), delimiter="\t"))


def row(name: str, steps: Sequence[float], peak_gb: float, phases: Sequence[str] = ()) -> str:
    """A line of the table: the first step, the median after it, the peak of torch, and the phases."""
    cells = [f"{steps[0]:.2f}", f"{statistics.median(steps[1:]):.2f}"] if len(steps) > 1 else ["-", "-"]
    phases = phases or ["-"] * (len(PHASES) - 1)
    return "| " + " | ".join([name, *cells, f"{peak_gb:.1f}", *phases]) + " |"


def app_row(folder: Path, case: str) -> str:
    """A run of the app."""
    steps = rows(folder, case)
    phases = [
        f"{statistics.median(float(step[f'timing_s/{phase}']) for step in steps[1:]):.2f}" for phase in PHASES[1:]
    ]
    peak = max(float(step["perf/max_memory_reserved_gb"]) for step in steps)
    return row(f"app, {case}", [float(step["timing_s/step"]) for step in steps], peak, phases)


def trl_row(log: str) -> str:
    """The run of TRL, from its log."""
    found = re.findall(r"^trl step \d+: ([\d.]+) s, ([\d.]+) GB", log, re.MULTILINE)
    return row("TRL, full", [float(seconds) for seconds, _ in found], max((float(gb) for _, gb in found), default=0.0))


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--student", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--teacher", choices=sorted(CONFIGS), default="qwen3-4b")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated; default: full")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peer", choices=("trl", "none"), default="trl")
    parser.add_argument("--peer-args", default="", help="further arguments of trl_step.py")
    parser.add_argument("--one-gpu", action="store_true", help="one after the other on the first GPU")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one run")
    args, extra = parser.parse_known_args()
    cases = args.case or ["full"]
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for role in ("student", "teacher"):
        if not (folder / role / "config.json").is_file():
            write_random_model(getattr(args, role), folder / role)
    write_prompts(folder, BATCH_SIZE * args.steps)
    apps = [
        Run(case, [sys.executable, "-m", "apps.distill.main", *settings(folder, case, args.steps), *extra],
            folder / f"{case}.log", "0")
        for case in cases
    ]  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.distill_step.trl_step", str(folder), f"--steps={args.steps}"]
    peer = Run("trl", [*command, *args.peer_args.split()], folder / "trl.log", "0" if args.one_gpu else "1")
    if args.peer == "trl" and not args.one_gpu:
        peer.start()
    for run in apps:
        run.start()
        print(f"{run.name}: exit code {run.end(args.timeout)}, {run.log}", flush=True)
    if args.peer == "trl":
        if args.one_gpu:
            peer.start()
        print(f"trl: exit code {peer.end(args.timeout)}, {peer.log}", flush=True)
    names = ["", "first step", "median after it", "peak GB", *PHASES[1:]]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    print("\n".join(app_row(folder, case) for case in cases if rows(folder, case)))
    if args.peer == "trl":
        print(trl_row(peer.log.read_text(errors="replace")))


if __name__ == "__main__":
    main()
