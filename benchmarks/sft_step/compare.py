"""Tokens per second of supervised fine-tuning: the SFT app on the first GPU, TRL's SFTTrainer on the second, at once.

`python -m benchmarks.sft_step.compare FOLDER [--case full|lora] [--peer trl|none] [key=value ...]` needs two GPUs and
TRL (no TRL with `--peer none`), and prints the table of README.md. On a host with one GPU, `--one-gpu` runs the two one
after the other, each alone. Further keys go to the app.
"""

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sft_step.trl_step import LORA_ALPHA, LORA_RANK
from benchmarks.sft_step.workload import BATCH_SIZE, MAX_TOKENS, write_workload

SKIPPED = 2
"""Steps at the start that compile or tune kernels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is trained of it."""

    model: str
    app: Sequence[str] = ()
    trl: Sequence[str] = ()


CASES = {
    "full": Case(model="qwen3-0.6b"),
    "lora": Case(
        model="qwen2-7b",
        app=(f"engine.lora.rank={LORA_RANK}", f"engine.lora.alpha={LORA_ALPHA}"),
        trl=("--lora", "--recompute"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step took."""

    tokens: float
    """Prompt and response tokens, without padding."""
    seconds: float
    peak_gb: float
    """Reserved device memory in 1e9 bytes."""


def app_command(folder: Path, case: Case, steps: int, extra: Sequence[str]) -> list[str]:
    """The SFT app with what S is; no key tunes anything."""
    return [
        *(sys.executable, "-m", "apps.sft.main"),
        f"model.path={folder}/model",
        f"supervised.files={folder}/train.parquet",
        f"data.max_prompt_length={MAX_TOKENS}",
        f"supervised.steps={steps}",
        f"supervised.batch_size={BATCH_SIZE}",
        "trainer.experiment=sft_step",
        f"trainer.output_dir={folder}/outputs",
        "trainer.export_model=false",
        *case.app,
        *extra,
    ]


def app_steps(folder: Path) -> list[Step]:
    """The steps of the app's newest run; none if it wrote no metrics."""
    found = max(folder.glob("outputs/sft_step_*/metrics.tsv"), default=None)
    if found is None:
        return []
    with found.open() as file:
        return [app_step(row) for row in csv.DictReader(file, delimiter="\t")]


def app_step(row: Mapping[str, str]) -> Step:
    """A row of metrics.tsv."""
    return Step(
        tokens=float(row["perf/total_num_tokens"]),
        seconds=float(row["timing_s/step"]),
        peak_gb=float(row["perf/max_memory_reserved_gb"]),
    )


def trl_steps(log: str) -> list[Step]:
    """The steps in the output of trl_step.py."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith('{"step"')]
    return [Step(tokens=line["tokens"], seconds=line["seconds"], peak_gb=line["peak_gb"]) for line in lines]


def summary(name: str, steps: Sequence[Step]) -> str:
    """A line of the table: medians after the first steps, seconds of all steps with compilation, the peak."""
    measured = steps[SKIPPED:]
    if not measured:
        return f"| {name} | — | — | — | — |"
    speed = statistics.median(step.tokens / step.seconds for step in measured)
    median = statistics.median(step.seconds for step in measured)
    total, peak = sum(step.seconds for step in steps), max(step.peak_gb for step in steps)
    return f"| {name} | {speed:,.0f} | {median:.2f} | {total:.1f} | {peak:.1f} |"


def start(command: Sequence[str], log: Path, *, gpu: int) -> subprocess.Popen[bytes]:
    """Starts a command on a GPU, in a process group of its own; its output goes to `log`."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen(
        command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True
    )


def wait(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """The exit code; 124 if the time limit ended it."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        return 124


def main() -> None:
    """Runs both and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=sorted(CASES), default="full")
    parser.add_argument("--model", help="another configuration of benchmarks.random_model, to try this script")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peer", choices=("trl", "none"), default="trl")
    parser.add_argument("--peer-args", default="", help="further arguments of trl_step.py, such as '--per-forward 16'")
    parser.add_argument("--one-gpu", action="store_true", help="one after the other on the first GPU")
    parser.add_argument("--timeout", type=float, default=560.0, help="seconds for each")
    args, extra = parser.parse_known_args()
    folder, case = args.folder.absolute(), CASES[args.case]
    folder.mkdir(parents=True, exist_ok=True)
    write_workload(folder, model=args.model or case.model, num_steps=args.steps)
    trl = [sys.executable, "-m", "benchmarks.sft_step.trl_step", str(folder), f"--steps={args.steps}", *case.trl]
    commands = {"app": app_command(folder, case, args.steps, extra)}
    if args.peer == "trl":
        commands["trl"] = [*trl, *args.peer_args.split()]
    logs = {name: folder / f"{name}.log" for name in commands}
    if args.one_gpu:
        codes = {name: wait(start(command, logs[name], gpu=0), args.timeout) for name, command in commands.items()}
    else:
        running = {name: start(commands[name], logs[name], gpu=gpu) for gpu, name in enumerate(commands)}
        codes = {name: wait(process, args.timeout) for name, process in running.items()}
    print("\n".join(f"{name}: exit code {code}, {logs[name]}" for name, code in codes.items()))
    print("| | tokens/s (median) | seconds a step (median) | all steps, s | peak GB |\n| --- | --- | --- | --- | --- |")
    print(summary("app", app_steps(folder)))
    if args.peer == "trl":
        print(summary("TRL", trl_steps(logs["trl"].read_text(errors="replace"))))


if __name__ == "__main__":
    main()
