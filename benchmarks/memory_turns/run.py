"""GRPO of a 7B configuration with random weights, side by side and in turns: seconds, memory and what turns cost.

`python -m benchmarks.memory_turns.run FOLDER` runs the cases that the GPUs allow (all: two H200s), `--cases` some of
them, and prints a table. Further `section.key=value` arguments go to every run.
"""

import argparse
import csv
import os
import re
import statistics
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grpo_step.compare import Run, app
from benchmarks.grpo_step.workload import write_workload
from benchmarks.random_model import CONFIGS

ZERO_3 = ("actor.zero.stage=3",)
LORA = ("actor.lora.rank=16", "rollout.max_lora_rank=16")
PHASES = ("step", "gen", "old_log_prob", "update_actor", "sync", "sleep", "wake", "offload", "reload")
_POLL_S = 0.5


@dataclass(frozen=True)
class Case:
    """One run."""

    gpus: int
    overrides: tuple[str, ...]


CASES = {
    "one": Case(1, ZERO_3),
    "one_lora": Case(1, LORA),
    "one_lora_servers": Case(1, (*LORA, "trainer.take_turns=servers")),
    "two": Case(2, ZERO_3),
    "two_servers": Case(2, (*ZERO_3, "trainer.take_turns=servers")),
    "two_both": Case(2, (*ZERO_3, "trainer.take_turns=both")),
}
"""Name -> run; `take_turns` is left to the planner where it is not named."""


class PeakMemory:
    """The largest memory in use on the first GPUs, in GiB, while it is entered; 0 without nvidia-smi."""

    def __init__(self, num_gpus: int) -> None:
        self.gib = 0.0
        self._query = ["nvidia-smi", f"--id={','.join(map(str, range(num_gpus)))}"]
        self._query += ["--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        while True:
            try:
                found = subprocess.run(self._query, capture_output=True, text=True, check=True, timeout=20).stdout
            except (OSError, subprocess.SubprocessError):
                return
            self.gib = max(self.gib, *(float(line) / 1024 for line in found.split()))
            if self._done.wait(_POLL_S):
                return


def metrics(folder: Path, name: str) -> list[Mapping[str, float]]:
    """The metrics of each step of the newest run of this name."""
    newest = max(folder.glob(f"outputs/{name}_*/metrics.tsv"), default=None)
    rows = [] if newest is None else csv.DictReader(newest.open(), delimiter="\t")
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def median(steps: Sequence[Mapping[str, float]], key: str, digits: int = 2) -> str:
    """Over the steps after the first; a dash if the metric is absent."""
    values = [step[key] for step in steps[1:] if key in step]
    return f"{statistics.median(values):.{digits}f}" if values else "-"


def table_row(name: str, code: int, steps: Sequence[Mapping[str, float]], peak_gib: float) -> str:
    """One case as a row of the table."""
    cells = [name, str(code), str(len(steps))]
    cells += [median(steps, f"timing_s/{phase}") for phase in PHASES]
    cells += [median(steps, key) for key in ("turns/moved_gb", "perf/max_memory_reserved_gb")]
    cells += [f"{peak_gib:.1f}", median(steps, "rollout/log_prob_mismatch", 4)]
    return "| " + " | ".join(cells) + " |"


def header() -> str:
    """The first two lines of the table."""
    names = ["case", "exit code", "steps", *PHASES, "moved GB", "reserved GB", "GPU peak GiB", "mismatch"]
    return "| " + " | ".join(names) + " |\n|" + " --- |" * len(names)


def run(folder: Path, name: str, steps: int, extra: Sequence[str], timeout_s: float) -> str:
    """Runs a case, prints its plan, and returns its row."""
    case = CASES[name]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[: case.gpus]
    process: Run = app(folder, name, ",".join(gpus), steps, (*case.overrides, *extra))
    with PeakMemory(case.gpus) as peak:
        process.start()
        code = process.end(timeout_s)
    text = process.log.read_text(errors="replace")
    print(f"\n## {name}: exit code {code}")
    print("\n".join(re.findall(r"^(?:chosen for|memory of|ready after).*", text, re.MULTILINE)))
    if code:
        print("\n".join(text.splitlines()[-15:]))
    return table_row(name, code, metrics(folder, name), peak.gib)


def main() -> None:
    """Runs the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen2-7b")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one run")
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_workload(folder, model=args.model)
    rows = [run(folder, name, args.steps, extra, args.timeout) for name in args.cases]
    print("\n" + "\n".join([header(), *rows]))


if __name__ == "__main__":
    main()
