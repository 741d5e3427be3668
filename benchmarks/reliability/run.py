"""`plinth bench` with a random model: ZeRO cases of PPO, or ZeRO-1 against ZeRO-2, with every collective guarded.

`python -m benchmarks.reliability.run FOLDER [six_case|stage_gate] [key=value ...]` writes the model and prompts unless
FOLDER has them, runs the benchmark with those keys of its own, and prints its tables. `--more section.key=value` adds a
key to every case:

    python -m benchmarks.reliability.run FOLDER six_case 'cases=["zero3_no_offload"]'
    python -m benchmarks.reliability.run /tmp/work six_case --model qwen3-tiny steps=2 --more trainer.device=cpu
"""

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.random_model import ensure_random_model
from benchmarks.runs import Run, leave, parser, table_header, table_row, visible_gpus
from rl_data import write_task


def write(folder: Path, model: str) -> None:
    """The model and prompts, unless they exist."""
    ensure_random_model(model, folder / "model")
    if not (folder / "train.parquet").is_file():
        task = write_task(folder / "task", num_train=1024, num_val=64, num_demonstrations=8, seed=0)
        task.train.rename(folder / "train.parquet")


def command(folder: Path, kind: str, steps: int, more: Sequence[str], extra: Sequence[str]) -> list[str]:
    """The benchmark. Differences from the presets: model, data and reward; 64 requests at once per server, not 8."""
    overrides = [
        f"model.path={folder}/model",
        f"data.train={folder}/train.parquet",
        "data.val=[]",
        "reward.method=flexible",
        "reward.format_score=0.5",
        "rollout.max_num_seqs=64",
        "actor.collective_guard=auto",
        "critic.collective_guard=auto",
        *more,
    ]
    keys = [f"run_tag={kind}", f"output_dir={folder}/outputs", f"steps={steps}", "retries=0"]
    return [sys.executable, "-m", "apps.bench.main", kind, *keys, f"overrides={json.dumps(overrides)}", *extra]


def tables(folder: Path, kind: str) -> str:
    """The newest run's tables in Markdown."""
    newest = max(folder.glob(f"outputs/{kind}_*/summary.tsv"), default=None)
    lines = []
    for path in sorted(newest.parent.glob("*.tsv")) if newest else ():
        header, *rows = csv.reader(path.open(), delimiter="\t")
        lines += [f"\n{path.stem}:", table_header(header), *map(table_row, rows)]
    return "\n".join(lines)


def main() -> None:
    """Runs it."""
    arguments = parser(__doc__, model="qwen3-0.6b", steps=20, timeout_s=86_400.0)
    arguments.add_argument("kind", choices=("six_case", "stage_gate"), nargs="?", default="six_case")
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--more", nargs="+", action="extend", default=[], metavar="section.key=value")
    args, extra = arguments.parse_known_args()
    write(args.folder, args.model)
    line = command(args.folder, args.kind, args.steps, args.more, extra)
    run = Run(args.kind, line, args.folder / f"{args.kind}.log", visible_gpus(args.gpus))
    run.start()
    code = run.end(args.timeout)
    print(run.report(code) + tables(args.folder, args.kind) + f"\nGPU peak {run.peak} GiB")
    leave([code if code != 1 or run.matches("^failed: ") else 0])  # 1 is also a verdict, which is a result


if __name__ == "__main__":
    main()
