"""Benchmarks shared prefixes: updates, log-probs, attention and the longest prompt with and without them, in one run.

    python -m benchmarks.shared_prefix.run --out FOLDER [--models qwen3-0.6b] [--cases W 4k] [--no-memory]
    python -m benchmarks.shared_prefix.run --out FOLDER --cpu        # tries the script with a tiny model

Each model has one process. A job that ends it is recorded as failed, and the jobs after it go on in another process.
Every record is printed and appended to FOLDER/records.jsonl at once, and FOLDER/tables.md has the tables so far.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.runs import table_header, table_row
from benchmarks.shared_prefix.measure import CASES, KINDS, SETUPS, Record, jobs_of, run_jobs
from benchmarks.shared_prefix.parts import PARTS

ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "8"}
"""As the ranks of an app have it."""


def records_of(command: Sequence[str], model: str, jobs: Sequence[str]) -> Iterator[Record]:
    """Records that the jobs print, in as few processes as they leave alive."""
    left = list(jobs)
    while left:
        with subprocess.Popen(
            [*command, "--models", model, "--jobs", *left],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith('{"'):
                    continue
                record = json.loads(line)
                if "job_seconds" in record:
                    left.remove(record["job"])
                yield record
        if left:
            yield {"model": model, "job": left.pop(0), "failed_with_exit_code": process.returncode}


def gib(record: Record) -> str:
    """A peak, if it was measured."""
    return "-" if record.get("peak_gib") is None else f"{record['peak_gib']:.1f}"


def timing_row(record: Record) -> list[Any]:
    """Both kinds of one pass side by side."""
    unshared, shared = (record[kind] for kind in KINDS)
    seconds = [
        f"{each['seconds']:.3f} ({each['rounds']})" if "seconds" in each else "out of memory"
        for each in (unshared, shared)
    ]
    difference = record.get("difference", {"mean": float("nan"), "max": float("nan")})
    return [
        record["model"],
        record["job"],
        f"{record['samples']} x ({record['prompt']} + {record['response']})",
        record["pass"].replace("_", "-"),
        f"{record['sample_tokens']:,}",
        f"{shared['computed_tokens']:,}",
        f"{record['sample_tokens'] / shared['computed_tokens']:.2f}",
        *seconds,
        f"**{record['ratio']:.2f}**" if "ratio" in record else "-",
        f"{gib(unshared)} / {gib(shared)}",
        difference["mean"],
        difference["max"],
    ]


def memory_row(record: Record) -> list[Any]:
    """The longest prompt of one kind of micro batch."""
    tokens = f"{record.get('computed_tokens', 0):,}"
    lengths = [f"{record['longest_prompt']:,}", f"{record['too_long']:,}" if record["too_long"] else "-"]
    return [record["model"], record["kind"], *lengths, tokens, gib(record), record["attempts"]]


def attention_row(record: Record) -> list[Any]:
    """Attention of one layout."""
    times = [f"{record[name]:.3f}" for name in ("forward_ms", "forward_backward_ms")]
    tokens = f"{record['computed_tokens']:,}"
    return [record["model"], record["case"], record["kind"], record["kernel"], tokens, record["sequences"], *times]


def peer_row(record: Record) -> list[Any]:
    """Updates of another trainer."""
    seconds = f"{record['seconds']:.3f} ({record['rounds']})" if "seconds" in record else "out of memory"
    return [record["model"], record["case"], record["peer"], record.get("per_forward", "-"), seconds, gib(record)]


def parts_row(record: Record) -> list[Any]:
    """Milliseconds of an update."""
    tokens = f"{record['computed_tokens']:,}"
    return [record["model"], record["case"], record["kind"], tokens, *(f"{record[part]:.1f}" for part in PARTS)]


TIMING = """model, case, samples x (prompt + response), pass, tokens of the samples, computed with sharing, token ratio,
s unshared (rounds), s shared (rounds), ratio, peak GiB unshared / shared, log-probs differ by: mean, max"""
TABLES: tuple[tuple[str, tuple[str, ...], str, Callable[[Record], list[Any]]], ...] = (
    ("Updates and log-probs", ("log_probs", "update"), TIMING, timing_row),
    (
        "Longest prompt",
        ("memory",),
        "model, in a micro batch, longest prompt, too long, computed tokens of a micro batch, peak GiB, attempts",
        memory_row,
    ),
    (
        "Attention alone",
        ("attention",),
        "model, case, kind, kernel, computed tokens, sequences or nodes, ms forward, ms forward and backward",
        attention_row,
    ),
    ("Updates of peers", ("peer",), "model, case, peer, samples per forward pass, s (rounds), peak GiB", peer_row),
    (
        "Milliseconds of an update",
        ("parts",),
        "model, case, kind, computed tokens, " + ", ".join(PARTS),
        parts_row,
    ),
)
"""Title, passes, names of the columns and a row of each table."""


def tables(records: Sequence[Record]) -> str:
    """Markdown: a table of each kind, then the jobs that failed."""
    text = ""
    for title, passes, names, row in TABLES:
        chosen = [table_row(row(record)) for record in records if record.get("pass") in passes]
        if chosen:
            header = table_header([name.strip() for name in names.split(",")])
            text += "\n".join([f"## {title}\n", header, *chosen]) + "\n\n"
    failed = [f"{r['model']}, {r['job']}: exit code {r['failed_with_exit_code']}" for r in records if is_failed(r)]
    return text + "".join(f"* failed: {line}\n" for line in failed)


def is_failed(record: Record) -> bool:
    """A job that ended its process."""
    return "failed_with_exit_code" in record


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of records.jsonl and tables.md")
    parser.add_argument("--models", choices=sorted(SETUPS), nargs="+", help="default: 0.6B and 7B, with --cpu the tiny")
    parser.add_argument("--cases", choices=sorted(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="skip the longest prompts")
    parser.add_argument("--no-attention", dest="attention", action="store_false", help="skip attention alone")
    parser.add_argument("--peers", choices=("TRL", "Arctic"), nargs="+", default=[], help="time their updates as well")
    parser.add_argument("--parts", action="store_true", help="profile an update of each case")
    parser.add_argument("--token-budget", type=int, help="computed tokens of a micro batch")
    parser.add_argument("--rounds", type=int, default=3, help="calls that are timed")
    parser.add_argument("--seconds", type=float, default=6.0, help="no further round (of 2 at least) after so many")
    parser.add_argument("--memory-seconds", type=float, default=20.0, help="no further attempt after so many")
    parser.add_argument("--longest", type=int, default=131072, help="longest prompt that is tried")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--jobs", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs:
        for record in run_jobs(
            args.models[0],
            args.jobs,
            cpu=args.cpu,
            token_budget=args.token_budget,
            rounds=args.rounds,
            limit_s=args.seconds,
            memory_s=args.memory_seconds,
            most=args.longest,
        ):
            print(json.dumps(record), flush=True)
        return
    command = [sys.executable, "-m", "benchmarks.shared_prefix.run", *sys.argv[1:]]
    args.out.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    for model in args.models or (["qwen3-tiny"] if args.cpu else ["qwen3-0.6b", "qwen2-7b"]):
        jobs = jobs_of(args.cases, memory=args.memory, attention=args.attention, parts=args.parts and not args.cpu)
        runs = [records_of(command, model, jobs)]
        for peer in args.peers:
            other = [sys.executable, "-m", "benchmarks.shared_prefix.peers", *sys.argv[1:]]
            runs.append(records_of(other, model, [f"{peer}: {case}" for case in args.cases]))
        for record in chain(*runs):
            records.append(record)
            print(json.dumps(record), flush=True)
            (args.out / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
            (args.out / "tables.md").write_text(tables(records))
    print(f"\n{tables(records)}", flush=True)
    sys.exit(any(map(is_failed, records)))


if __name__ == "__main__":
    main()
