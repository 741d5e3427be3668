"""Workload V with the app's defaults on the first GPU, TRL's GRPOTrainer on the second, at once.

`python -m benchmarks.vision_step.compare FOLDER [--peer trl|none] [key=value ...]`; `--one-gpu` runs one after the
other on the first. Further keys go to the app. README.md has the figures.
"""

import subprocess
import sys

from benchmarks import trl_peer
from benchmarks.runs import Steps, app, leave, parser, run_folder, table_header, table_row, visible_gpus
from benchmarks.vision_step.workload import settings

COLUMNS = {
    "step, s": "timing_s/step",
    "generation": "timing_s/gen",
    "updates": "timing_s/update_actor",
    "mismatch": "rollout/log_prob_mismatch",
}


def main() -> None:
    """Runs both and prints the steps of each."""
    arguments = parser(__doc__, steps=4, timeout_s=560.0)
    arguments.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    arguments.set_defaults(ranks=1)
    trl_peer.add_arguments(arguments)
    args, extra = arguments.parse_known_args()
    if not (args.folder / "train.jsonl").is_file():  # in a process of its own, which leaves no GPU memory taken
        small = ["--small"] * args.small
        subprocess.run([sys.executable, "-m", "benchmarks.vision_step.workload", str(args.folder), *small], check=True)
    ours = app(args.folder, "vision_step", visible_gpus(1), [*settings(args.folder, args.steps), *extra])
    trl = trl_peer.peer("benchmarks.vision_step.trl_step", args.folder, args) if args.peer == "trl" else None
    codes = trl_peer.run_beside([ours], trl, args)
    steps = Steps(run_folder(args.folder, "vision_step"))
    print(table_header(["app", *COLUMNS]))
    for number, row in enumerate(zip(*map(steps.series, COLUMNS.values()), strict=True), 1):
        print(table_row([number, *row]))
    print(f"the app's GPU held {ours.peak} GiB at its peak")
    if trl:
        print(f"TRL's GPU held {trl.peak} GiB at its peak", *trl.matches(r"^trl (?:own )?step.*"), sep="\n")
    leave(codes)


if __name__ == "__main__":
    main()
