"""Prepares data sets for training: one schema, a split, no duplicates, no held-out prompts, and a data card.

    $ python -m rl_data prepare gsm8k/train.jsonl --held-out gsm8k/test.jsonl --out data
    $ plinth grpo model.path=MODEL data.train=data/train.parquet data.val=data/val.parquet

GSM8K, MATH, chat messages and verl's columns are recognized; rows that cannot be used are listed with their file and
row. `plinth prepare` is the same command.
"""

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from plinth_base.errors import PlinthError

from ..errors import DataConfigError, DataError
from .card import CONFLICT, REASONS, Report
from .config import PrepareConfig
from .pipeline import prepare_data, with_option


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, default `sys.argv[1:]`; return the exit code.

    0: success; 1: files cannot be written; 2: bad arguments or data; 130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options: dict[str, Any] = vars(make_parser().parse_args(arguments))
    prints_config = options.pop("print_config")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
        config = PrepareConfig(**(options | lists))
        if prints_config:
            print(json.dumps(asdict(config), indent=2))
            return 0
        if not sys.stderr.isatty():
            _disable_progress_bars()
        report = prepare_data(config, command=shlex.join(["python", "-m", "rl_data", "prepare", *arguments]))
    except PlinthError as error:
        print(f"error: {_for_command_line(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options['out']}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    print("\n".join(_summary(report, config)))
    return 0


def _disable_progress_bars() -> None:
    from datasets import disable_progress_bars

    disable_progress_bars()


def _for_command_line(error: PlinthError) -> str:
    if isinstance(error, DataConfigError) and error.field:
        return f"--{error.field.replace('_', '-')}: {error.explanation}"
    return str(with_option(error) if isinstance(error, DataError) else error)


def make_parser() -> argparse.ArgumentParser:
    """The options are the fields of `PrepareConfig`."""
    doc, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="plinth prepare",
        usage="%(prog)s FILE [FILE ...] --out FOLDER [options]",
        description=doc,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in fields(PrepareConfig):
        arguments = dict(option.metadata)
        text, default = arguments.pop("help").replace("%", "%%"), option.default
        if option.name == "files":
            parser.add_argument("files", help=text, **arguments)
            continue
        if default not in (None, (), False, MISSING):
            text += f" (default: {default})"
        name = f"--{option.name.replace('_', '-')}"
        parser.add_argument(name, required=default is MISSING, default=default, help=text, **arguments)
    parser.add_argument("--print-config", action="store_true", help="print all options as JSON, and do nothing else")
    return parser


def _summary(report: Report, config: PrepareConfig) -> list[str]:
    counts = report.counts
    lines = [*report.notes, f"{report.num_read:,} rows read"]
    lines += [f"{counts[reason]:,} dropped: {reason}" for reason in REASONS if counts[reason]]
    lines += [f"{counts[CONFLICT]:,} rows: {CONFLICT}"] if counts[CONFLICT] else []
    if missing := report.num_kept - report.num_ground_truths:
        lines.append(f"{missing:,} rows have no ground truth: rewards of answers refuse them (plinth grpo, plinth ppo)")
    written = [file for file in report.files if file.use == "written"]
    lines += [f"{config.out}/{file.name}: {file.num_rows:,} rows" for file in written]
    return [*lines, f"{config.out}/card.md describes them"]
