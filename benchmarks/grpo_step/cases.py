"""Cases of workload W: each is a run of the GRPO app with settings of its own, and a row of a table.

Rows are kept in the folder: a case that completed there with the same settings is not run again, and the table has all
cases of the folder.
"""

import contextlib
import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.flops import training_mfu
from benchmarks.grpo_step.workload import NUM_PROMPTS, settings, write_workload
from benchmarks.runs import (
    INTERRUPTED,
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
from ds_engine import ModelShape
from run_kit import MetricsTable

_PLANNED = r"([\d.]+) GiB for (?:a|the) (rank|sleeping server|server|waiting rank)"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of W."""

    gpus: int
    keys: tuple[str, ...] = ()
    num_prompts: int = NUM_PROMPTS
    """Prompts of a step; half of them an update."""
    relative_to: str = ""
    """The case whose throughput per GPU is 1."""
    kill_after: int = 0
    """A rank is killed when so many steps are done; 0: none is."""
    peer: tuple[str, ...] = ()
    """Module and arguments of a script that runs another trainer on the folder; empty: the GRPO app with `keys`."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Files and processes of a case that has ended."""

    model: Path
    run: Run
    folder: Path | None
    """The run folder; None if there is none."""

    @cached_property
    def steps(self) -> Steps:
        """Its metrics."""
        return Steps(self.folder)


Column = Callable[[Result], float | str]


def metric(name: str, *, skip: int = 1) -> Column:
    """The median of a metric after the first `skip` steps."""
    return lambda result: result.steps.median(name, skip=skip)


def mfu(result: Result) -> float:
    """That of the updates, on the ranks' GPUs; tokens of shared prompts count once."""
    if result.folder is None or not len(result.steps) or not (result.folder / "config.yaml").is_file():
        return math.nan
    num_ranks = int(yaml.safe_load((result.folder / "config.yaml").read_text())["trainer"]["num_ranks"])
    prompt, response = (result.steps.median(f"{part}_length/mean") for part in ("prompt", "response"))
    computed, tokens = (result.steps.median(f"actor/{name}_per_update") for name in ("computed_tokens", "tokens"))
    computed_of_prompt = max(1, (prompt + response) * computed / tokens - response)
    return training_mfu(
        ModelShape.read(result.model),
        prompt=prompt,
        response=response,
        shared_by=prompt / computed_of_prompt,
        sequences=result.steps.median("rollout/num_samples"),
        gpu_seconds=result.steps.median("timing_s/update_actor") * num_ranks,
    )


def planned_gib(result: Result) -> float:
    """The most that the memory plan expects on a GPU; nan without a plan."""
    plan = {name: float(gib) for gib, name in result.run.matches(_PLANNED)}
    if not plan:
        return math.nan
    rank, server = plan.get("rank", 0.0), plan.get("server", 0.0)
    if "sleeping server" in plan:
        return max(rank + plan["sleeping server"], server + plan["waiting rank"])
    return rank + server


GUARD: Mapping[str, Column] = {
    "collectives": metric("actor/guarded_collectives"),
    "divergences": lambda result: len(result.run.matches("ranks diverge")),
    "restarts of ranks": lambda result: len(result.run.matches("new ranks continue after")),
}
"""Collectives that the guard compared in a step, divergences that it reported, and restarts of ranks."""
MEMORY: Mapping[str, Column] = {
    "planned GiB": planned_gib,
    "GPU peak GiB": lambda result: result.run.peak,
    "reserved GB": metric("perf/max_memory_reserved_gb"),
}
"""A GPU with a rank as planned, all GPUs as NVML counts them; what torch reserved on a rank (1e9 bytes)."""
_SPEED = "tokens/s per GPU"
SPEED: Mapping[str, Column] = {
    "first step ended, s": lambda result: first_step_s(result.run, result.folder),
    _SPEED: metric("perf/throughput"),
    "MFU of updates": mfu,
}


def timings(*phases: str) -> Mapping[str, Column]:
    """A column of median seconds for each phase."""
    return {phase: metric(f"timing_s/{phase}") for phase in phases}


def kill_a_rank(run: Run, folder: Path, after: int, done: threading.Event) -> None:
    """Kills one rank of the run once, when `after` steps are done."""
    while not done.wait(0.5):
        if run.process and len(Steps(run_folder(folder, run.name))) >= after:
            for process in psutil.Process(run.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "TrainerWorker" in " ".join(process.cmdline()):
                        process.kill()
                        return


def keep_steps(run: Run, folder: Path) -> None:
    """Keeps the steps that another trainer's script printed as the metrics of a run."""
    made = folder / "outputs" / f"{run.name}_{datetime.now(UTC):%Y%m%d_%H%M%S}"
    made.mkdir(parents=True)
    table = MetricsTable(made / "metrics.tsv")
    for step, seconds, reserved in run.matches(r"^\w+ step (\d+): ([\d.]+) s, ([\d.]+) GB reserved"):
        table.log(int(step), {"timing_s/step": float(seconds), "perf/max_memory_reserved_gb": float(reserved)})


def start(folder: Path, name: str, case: Case, keys: Sequence[str], timeout_s: float) -> tuple[int, Result]:
    """Runs a case; its exit code and what it left behind."""
    gpus, done = visible_gpus(case.gpus), threading.Event()
    command = [sys.executable, "-m", *case.peer[:1], str(folder), *keys]
    run = Run(name, command, folder / f"{name}.log", gpus) if case.peer else app(folder, name, gpus, keys)
    earlier = run_folder(folder, name)
    run.start()
    if case.kill_after:
        threading.Thread(target=kill_a_rank, args=(run, folder, case.kill_after, done), daemon=True).start()
    code = run.end(timeout_s)
    done.set()
    print(run.report(code), flush=True)
    if case.peer:
        keep_steps(run, folder)
    made = run_folder(folder, name)
    return code, Result(model=folder / "model", run=run, folder=made if made != earlier else None)


def table(cases: Mapping[str, Case], columns: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows that there are, in the order of the cases; a last column compares speeds if a case asks for it."""
    names = ["exit code", "steps", *columns]
    relative = ["relative per GPU"] if any(case.relative_to for case in cases.values()) else []
    lines = [table_header(["case", *names, *relative])]
    for name, row in ((name, rows[name]) for name in cases if name in rows):
        base = rows.get(cases[name].relative_to, {}).get(_SPEED, math.nan)
        ratio = [row.get(_SPEED, math.nan) / base] if relative else []
        lines.append(table_row([name, *(row.get(column, math.nan) for column in names), *ratio]))
    return "\n".join(lines)


def run_cases(
    doc: str | None,
    cases: Mapping[str, Case],
    columns: Mapping[str, Column],
    *,
    model: str = "qwen3-0.6b",
    steps: int,
    timeout_s: float,
    default: Sequence[str] = (),
) -> None:
    """A script's command line: runs the cases one after the other, and prints the table of all that the folder has.

    Args:
        doc: the script's description.
        cases: by name.
        columns: of the table.
        model: default of `--model`.
        steps: of each run; the first compiles and is in no median.
        timeout_s: of each run.
        default: the cases that run without `--cases`; none: all that need no other trainer.
    """
    arguments = parser(doc, model=model, steps=steps, timeout_s=timeout_s)
    own = [name for name, case in cases.items() if not case.peer]
    arguments.add_argument(
        "--cases", nargs="+", choices=list(cases), default=default or own, metavar="CASE", help=", ".join(cases)
    )
    if len(own) < len(cases):
        arguments.add_argument("--peer-args", default="", help="further arguments of the other trainer's script")
    arguments.add_argument("--gpus", type=int, help="GPUs of every case, instead of its own number")
    arguments.add_argument("--prompts", type=int, default=NUM_PROMPTS * 64, help="of an epoch")
    args, extra = arguments.parse_known_args()
    write_workload(args.folder, model=args.model, num_prompts=args.prompts)
    (args.folder / "rows").mkdir(exist_ok=True)
    codes = []
    for name in args.cases:
        case, kept = cases[name], args.folder / "rows" / f"{name}.json"
        case = replace(case, gpus=args.gpus or case.gpus)
        keys = [*settings(args.folder, args.steps, num_prompts=case.num_prompts), *case.keys, *extra]
        if case.peer:
            keys = [f"--steps={args.steps}", *case.peer[1:], *args.peer_args.split()]
        row = json.loads(kept.read_text()) if kept.is_file() else {}
        if row.get("exit code") == 0 and row["keys"] == keys:
            continue
        code, result = start(args.folder, name, case, keys, args.timeout)
        codes.append(code)
        row = {column: value(result) for column, value in columns.items()}
        kept.write_text(json.dumps({"keys": keys, "exit code": code, "steps": len(result.steps), **row}))
        if code == INTERRUPTED:
            break
    rows = {path.stem: json.loads(path.read_text()) for path in (args.folder / "rows").glob("*.json")}
    print("\n" + table(cases, list(columns), rows), flush=True)
    leave(codes)
