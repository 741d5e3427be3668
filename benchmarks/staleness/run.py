"""Workload W with asynchronous rollout: servers and ranks on GPUs of their own, or sharing them.

`python -m benchmarks.staleness.run FOLDER` runs each case on the first two GPUs and prints a table. `--long-tail` gives
responses log-normal lengths, `--gpus 0` takes one GPU (for the cases that share it); further `section.key=value`
arguments go to every run.
"""

import argparse
import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.grpo_step.compare import app
from benchmarks.grpo_step.workload import write_workload
from benchmarks.random_model import CONFIGS
from benchmarks.staleness.long_tail import MOST_TOKENS

APART = ("trainer.colocate=false", "trainer.num_ranks=1", "rollout.num_servers=1")
AHEAD = ("trainer.max_staleness=1",)
CASES: Mapping[str, tuple[str, ...]] = {
    "shared": (),
    "apart": APART,
    "apart_1": (*APART, *AHEAD),
    "apart_1_keep": (*APART, *AHEAD, "sync.running_requests=keep"),
    "apart_1_recompute": (*APART, *AHEAD, "sync.running_requests=recompute"),
    "shared_1": AHEAD,
    "shared_1_keep": (*AHEAD, "sync.running_requests=keep"),
}
"""Name -> settings: GPUs shared by ranks and servers or not, and the staleness."""
LONG_TAIL = (
    "episode.function=benchmarks.staleness.long_tail:respond",
    f"sampling.max_tokens={MOST_TOKENS}",
)
COLUMNS = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/update_actor",
    "timing_s/sync",
    "rollout/busy_s",
    "staleness/max",
    "rollout/correction_ess",
)


def run(folder: Path, name: str, steps: int, extra: Sequence[str], timeout_s: float, *, gpus: str) -> str:
    """Runs a case and returns its row: medians over the steps after the second, which still compiles."""
    process = app(folder, name, gpus, steps, (*CASES[name], *extra))
    process.start()
    code = process.end(timeout_s)
    if code:
        print(f"## {name}: exit code {code}\n" + process.log.read_text(errors="replace")[-2000:])
    newest = max(folder.glob(f"outputs/{name}_*/metrics.tsv"), default=None)
    rows = [] if newest is None else list(csv.DictReader(newest.open(), delimiter="\t"))[2:]
    cells = [name, str(code), str(len(rows))]
    for column in COLUMNS:
        values = [float(row[column]) for row in rows if row.get(column)]
        cells.append(f"{statistics.median(values):.2f}" if values else "-")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Runs the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["shared", "apart", "apart_1", "shared_1"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--long-tail", action="store_true")
    parser.add_argument("--gpus", default="0,1", help="ids, comma-separated")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one run")
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_workload(folder, model=args.model)
    extra = [*(LONG_TAIL if args.long_tail else ()), *extra]
    print("| case | exit code | steps | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (len(COLUMNS) + 3), flush=True)
    for name in args.cases:
        print(run(folder, name, args.steps, extra, args.timeout, gpus=args.gpus), flush=True)


if __name__ == "__main__":
    main()
