"""Runs a plan of measurements on this host, in calls of a few minutes that continue where the last one ended.

    python -m benchmarks.session FOLDER eight_gpus --gpus 8
    python -m benchmarks.session FOLDER eight_gpus --gpus 8 --dry-run     # what each call of 9.5 minutes would run

PLAN is a file of `benchmarks/session/plans` without its ending. FOLDER gets `records.jsonl` (a line a measurement; with
this file alone a session continues on another host), `summary.md`, and `raw.zip` with logs and metrics. Models and runs
lie in FOLDER_work, or where `--work` says. A measurement starts when its GPUs are free, in the plan's order. It ends
(by SIGINT, then SIGTERM) at its limit or when the call's minutes are over; what it printed until then is kept. The next
call runs again what failed or what the end of the call cut off. A measurement whose package (`needs`) is not installed
is skipped, and the summary says so. `--trial` tries the commands on a CPU.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.runs import INTERRUPTED, TIMED_OUT, Run, interrupted, visible_gpus
from benchmarks.session.plan import (
    PLANS,
    Measurement,
    Start,
    calls,
    next_start,
    read_plan,
    share_of_cores,
    unfinished,
)
from benchmarks.session.summary import summary
from plinth_base.fence import installed_version
from run_kit.machine.gpus import read_gpus
from run_kit.tracking.metrics_table import atomic_write

GRACE_S = 25.0
"""Kept at the end of a call: for what is ended then, and for the summary."""
SIGNALS = ((signal.SIGINT, 18.0), (signal.SIGTERM, 3.0))
PACKAGES = (
    "torch",
    "deepspeed",
    "vllm",
    "ray",
    "transformers",
    "flash-attn-4",
    "trl",
    "verl",
    "kernels",
    "bitsandbytes",
)
MOST_BYTES = 200_000
"""Of the end of a log in `raw.zip`."""


def host() -> tuple[str, str]:
    """The GPUs, and the versions of what is measured."""
    gpus, _ = read_gpus()
    device = f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}" if gpus else "CPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    measured = {
        "plinth": commit.strip() or "unknown",
        **{name: own for name in PACKAGES if (own := installed_version(name))},
    }
    return device, ", ".join(f"{name} {version}" for name, version in measured.items())


def measure(start: Start, work: Path, *, num_gpus: int) -> dict[str, Any]:
    """Runs a measurement to its end or limit; its record without the host's."""
    each = start.measurement
    words, ids = each.arguments(work), visible_gpus(num_gpus).split(",")
    command = [sys.executable if word == "python" else word for word in words]
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    output, errors = logs / f"{each.name}.out", logs / f"{each.name}.err"
    gpus = ",".join(ids[gpu] for gpu in start.gpus)
    run = Run(each.name, command, output, gpus, signals=SIGNALS, errors=errors)
    began, date = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    run.start()
    if run.process and not each.alone:
        cores = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(run.process.pid, share_of_cores(start.gpus, num_gpus=num_gpus, cores=cores))
    code = run.end(start.limit)
    cut = "limit" if start.limit == each.limit else "call"
    return {
        "name": each.name,
        "command": each.command,
        "ended": {0: "done", TIMED_OUT: cut, INTERRUPTED: "call"}.get(code, "failed"),
        "code": code,
        "seconds": round(time.monotonic() - began),
        "gpus": each.gpus,
        "peak_gib": run.peak if run.peaks_gib else "-",
        "date": date,
        "output": "\n".join(run.text.splitlines()[-200:]),
        "errors": "\n".join(errors.read_text(errors="replace").splitlines()[-15:]),
    }


def skipped(each: Measurement) -> dict[str, Any]:
    """The record of a measurement that cannot run here, without the host's."""
    return {
        "name": each.name,
        "command": each.command,
        "ended": "skipped",
        "code": "-",
        "seconds": 0,
        "gpus": each.gpus,
        "peak_gib": "-",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "output": f"Skipped: {each.lacks}.",
        "errors": "",
    }


def session(plan: Sequence[Measurement], args: argparse.Namespace) -> Mapping[str, Any]:
    """One call: runs what is unfinished until its minutes are over; the records of all measurements so far."""
    folder = args.folder
    deadline = time.monotonic() + 60 * args.minutes - GRACE_S
    path, work = folder / "records.jsonl", args.work or folder.with_name(f"{folder.name}_work")
    folder.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.is_file() else []
    records = {record["name"]: record for record in map(json.loads, lines)}
    device, versions = host()
    waiting = [each for each in unfinished(plan, records) if not args.only or each.name in args.only]

    def keep(measured: Mapping[str, Any]) -> None:
        record = {**measured, "device": device, "versions": versions}
        print(f"{record['name']}: {record['ended']} after {record['seconds']} s", flush=True)
        records[record["name"]] = record
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        atomic_write(folder / "summary.md", summary(args.plan, plan, records))

    for each in [each for each in waiting if each.lacks]:
        waiting.remove(each)
        keep(skipped(each))
    running: dict[Future[dict[str, Any]], Start] = {}
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        while True:
            left_s = 0.0 if interrupted.is_set() else deadline - time.monotonic()
            start = next_start(waiting, list(running.values()), num_gpus=args.gpus, left_s=left_s)
            if start is not None:
                waiting.remove(start.measurement)
                print(f"{start.measurement.name} on GPUs {start.gpus}, at most {start.limit:.0f} s", flush=True)
                running[pool.submit(measure, start, work, num_gpus=args.gpus)] = start
                continue
            if not running:
                for each in waiting:
                    print(f"{each.name}: not started, needs {each.seconds:.0f} s, {max(0.0, left_s):.0f} are left")
                return records
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                keep(future.result())
                keep_raw(work, folder / "raw.zip")


def keep_raw(work: Path, target: Path) -> None:
    """Metrics, configurations and the ends of logs, in one file."""
    # Runs that still go on may remove files.
    with contextlib.suppress(OSError), zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(work.rglob("*")):
            if path.suffix in (".log", ".out", ".err", ".tsv") or path.name == "config.yaml":
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - MOST_BYTES))
                    archive.writestr(str(path.relative_to(work)), file.read())


def show(plan: Sequence[Measurement], args: argparse.Namespace) -> None:
    """Prints what each call runs if measurements last as expected."""
    chosen, seconds = [each for each in plan if not args.only or each.name in args.only], 60 * args.minutes - GRACE_S
    fitting = calls(chosen, num_gpus=args.gpus, seconds=seconds)
    for number, made in enumerate(fitting, 1):
        print(f"call {number}:")
        for begin, end, start in made:
            gpus = ",".join(map(str, start.gpus))
            print(f"{begin:5.0f} to {end:4.0f} s, GPUs {gpus}: {start.measurement.name}: {start.measurement.command}")
    fits = {start.measurement.name for made in fitting for _, _, start in made}
    for each in chosen:
        if each.name not in fits:
            needs = f"needs {each.seconds:.0f} s on {each.gpus} GPUs"
            print(f"{each.name}: {needs}, more than a call of {seconds:.0f} s on {args.gpus}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).absolute())
    parser.add_argument("plan", choices=sorted(path.stem for path in PLANS.glob("*.yaml")))
    parser.add_argument("--gpus", type=int, required=True, help="of this host")
    parser.add_argument("--minutes", type=float, default=9.5, help="of this call")
    parser.add_argument("--work", type=lambda text: Path(text).absolute(), help="for models and runs, not FOLDER_work")
    parser.add_argument("--only", nargs="+", help="names of measurements")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--trial", action="store_true", help="with tiny models on a CPU")
    args = parser.parse_args()
    plan = read_plan(PLANS / f"{args.plan}.yaml", trial=args.trial)
    names = [each.name for each in plan]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: {args.plan} has {', '.join(names)}")
    if args.dry_run:
        show(plan, args)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    records = session(plan, args)
    print((args.folder / "summary.md").read_text() if records else "nothing was measured")


if __name__ == "__main__":
    main()
