"""Workload W with the app's defaults beside TRL or verl on the same host, then once more for the time to start.

`python -m benchmarks.grpo_step.compare FOLDER` needs two GPUs (the peer on the second) and `--peer` (`trl`, the
default, or `verl`) installed; `--peer none` runs the app alone, on one GPU. Prints the tables of README.md.
"""

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grpo_step.workload import (
    MINI_BATCH,
    NEW_TOKENS,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    SAMPLES,
    write_workload,
)

PHASES = ("step", "gen", "old_log_prob", "update_actor", "sync")


def settings(folder: Path, name: str, steps: int) -> list[str]:
    """What W is: model, data, batch, lengths. No key tunes anything."""
    return [
        f"model.path={folder}/model",
        f"data.train={folder}/train.parquet",
        f"data.max_prompt_length={PROMPT_TOKENS + 7}",
        "reward.function=benchmarks.grpo_step.workload:parity",
        f"batch.train_batch_size={NUM_PROMPTS}",
        f"batch.mini_batch_size={MINI_BATCH}",
        f"sampling.n={SAMPLES}",
        f"sampling.max_tokens={NEW_TOKENS}",
        "algorithm.kl_coef=0",
        f"trainer.experiment={name}",
        f"trainer.output_dir={folder}/outputs",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
        "trainer.export_model=false",
    ]


@dataclass
class Run:
    """A process whose output goes to a file."""

    name: str
    command: Sequence[str]
    log: Path
    gpus: str

    def start(self) -> None:
        """Starts it on its GPUs."""
        self.began = time.time()
        self.process = subprocess.Popen(
            self.command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": self.gpus},
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(self, timeout_s: float) -> int:
        """Waits for it; its exit code, 124 if it was ended."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 15)
            self.process.wait()
            return 124


def app(folder: Path, name: str, gpus: str, steps: int, extra: Sequence[str] = ()) -> Run:
    """The GRPO app."""
    command = [sys.executable, "-m", "apps.grpo.main", *settings(folder, name, steps), *extra]
    return Run(name, command, folder / f"{name}.log", gpus)


def timings(folder: Path, name: str) -> list[Mapping[str, float]]:
    """Phase -> seconds, for each step."""
    newest = max(folder.glob(f"outputs/{name}_*/metrics.tsv"), default=None)
    if newest is None:
        return []
    rows = csv.DictReader(newest.open(), delimiter="\t")
    return [{phase: float(row[f"timing_s/{phase}"] or "nan") for phase in PHASES} for row in rows]


def report(folder: Path, run: Run, code: int) -> None:
    """One run: exit code, chosen settings, start, steps."""
    steps = timings(folder, run.name)
    text = run.log.read_text(errors="replace")
    print(f"\n## {run.name}: exit code {code}")
    print("\n".join(re.findall(r"^(?:chosen for|memory of|ready after).*", text, re.MULTILINE)))
    print("| step | " + " | ".join(PHASES) + " |\n|" + " --- |" * (len(PHASES) + 1))
    for number, step in enumerate(steps, 1):
        print(f"| {number} | " + " | ".join(f"{step[phase]:.2f}" for phase in PHASES) + " |")
    if len(steps) > 1:
        print(f"median after step 1: {statistics.median(step['step'] for step in steps[1:]):.2f} s")
    if steps and (ready := re.search(r"^ready after ([\d.]+) s", text, re.MULTILINE)):
        print(f"first step ended {float(ready[1]) + steps[0]['step']:.0f} s after the run folder was made")


def main() -> None:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peer", choices=("trl", "verl", "none"), default="trl")
    parser.add_argument("--peer-steps", type=int, default=4)
    parser.add_argument("--again", type=int, default=4, help="steps of the second run; 0: none")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of one run")
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_workload(folder, model=args.model)
    ours = app(folder, "first", "0", args.steps, extra)
    module = f"benchmarks.grpo_step.{args.peer}_step"
    peer_command = [sys.executable, "-m", module, str(folder), "--steps", str(args.peer_steps)]
    peer = Run(args.peer, peer_command, folder / f"{args.peer}.log", "1")
    ours.start()
    if args.peer != "none":
        peer.start()
    report(folder, ours, ours.end(args.timeout))
    if args.again:
        again = app(folder, "again", "0", args.again, extra)
        again.start()
        report(folder, again, again.end(args.timeout))
    if args.peer != "none":
        code = peer.end(args.timeout)
        print(f"\n## {args.peer}: exit code {code}")
        print("\n".join(re.findall(rf"^{args.peer} step.*", peer.log.read_text(errors="replace"), re.MULTILINE)))


if __name__ == "__main__":
    main()
