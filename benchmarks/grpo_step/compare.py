"""Workload W with the app's defaults beside TRL or verl on the same host, then once more for the time to start.

`python -m benchmarks.grpo_step.compare FOLDER` needs a GPU more than the app (`--gpus 1`) for the peer, and `--peer`
(`trl`, the default, or `verl`) installed; `--peer none` runs the app alone. Prints the tables of README.md. Further
`section.key=value` arguments go to the app.
"""

import sys
from pathlib import Path

from benchmarks.grpo_step.workload import settings, write_workload
from benchmarks.runs import (
    Run,
    Steps,
    app,
    first_step_s,
    leave,
    parser,
    run_folder,
    table_header,
    table_row,
    visible_gpus,
)

PHASES = ("step", "gen", "old_log_prob", "update_actor", "sync")


def report(folder: Path, run: Run, code: int) -> int:
    """One run: exit code, which it returns, chosen settings, start, steps."""
    steps = Steps(run_folder(folder, run.name))
    print(run.report(code))
    print(table_header(["step", *PHASES]))
    for number, row in enumerate(zip(*(steps.series(f"timing_s/{phase}") for phase in PHASES), strict=True), 1):
        print(table_row([number, *row]))
    if len(steps) > 1:
        print(f"median after step 1: {steps.median('timing_s/step'):.2f} s; GPU peak {run.peak} GiB")
    first = first_step_s(run, run_folder(folder, run.name))
    print(f"first step ended {first:.0f} s after the command", flush=True)
    return code


def main() -> None:
    """Runs everything."""
    arguments = parser(__doc__, model="qwen3-0.6b", steps=8, timeout_s=400.0)
    arguments.add_argument("--gpus", type=int, default=1, help="of the app")
    arguments.add_argument("--peer", choices=("trl", "verl", "none"), default="trl")
    arguments.add_argument("--peer-steps", type=int, default=4)
    arguments.add_argument("--peer-args", default="", help="further arguments of the peer's script")
    arguments.add_argument("--again", type=int, default=4, help="steps of the second run; 0: none")
    args, extra = arguments.parse_known_args()
    folder, gpus = args.folder, visible_gpus(args.gpus)
    write_workload(folder, model=args.model)
    module = f"benchmarks.grpo_step.{args.peer}_step"
    peer_command = [sys.executable, "-m", module, str(folder), "--steps", str(args.peer_steps), *args.peer_args.split()]
    peer = Run(args.peer, peer_command, folder / f"{args.peer}.log", visible_gpus(1, first=args.gpus))
    if args.peer != "none":
        peer.start()
    codes = []
    for name, steps in (("first", args.steps), ("again", args.again)):
        if steps:
            run = app(folder, name, gpus, [*settings(folder, steps), *extra])
            run.start()
            codes.append(report(folder, run, run.end(args.timeout)))
    if args.peer != "none":
        codes.append(peer.end(args.timeout))
        print(peer.report(codes[-1]))
        print("\n".join(peer.matches(rf"^{args.peer} (?:step|with).*")))
    leave(codes)


if __name__ == "__main__":
    main()
