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
import time
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, fields
from typing import Any

from ..errors import RlDataError
from .config import PrepareConfig, with_options
from .pipeline import prepare_data
from .report import CONFLICT, CONTAMINATED_KEPT, REASONS, Report

_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, default `sys.argv[1:]`; return the exit code.

    0: success; 1: files cannot be written; 2: bad arguments or data; 130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    prints_config = options.pop("print_config")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    try:
        lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
        config = PrepareConfig(**(options | lists))
        if prints_config:
            print(json.dumps(asdict(config), indent=2))
            return 0
        report = prepare_data(config, command=shlex.join(["python", "-m", "rl_data", "prepare", *arguments]))
    except (RlDataError, ValueError) as error:
        print(f"error: {with_options(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or config.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    print(_summary(report, config, time.perf_counter() - started))
    return 0


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
    types_ = typing.get_type_hints(PrepareConfig)
    for field in fields(PrepareConfig):
        _add_option(parser, field, types_[field.name])
    parser.add_argument("--print-config", action="store_true", help="print all options as JSON, and do nothing else")
    return parser


def _add_option(parser: argparse.ArgumentParser, field: Field[Any], type_: Any) -> None:
    text, default = field.metadata["help"].replace("%", "%%"), field.default
    if field.name == "files":
        parser.add_argument("files", nargs="+", metavar="FILE", help=text)
        return
    arguments = [one for one in typing.get_args(type_) if one is not types.NoneType]
    how: dict[str, Any] = {"metavar": field.metadata.get("metavar", "N")}
    if type_ is bool:
        how = {"action": "store_true"}
    elif typing.get_origin(type_) is typing.Literal:
        how = {"choices": arguments}
    elif type_ == tuple[str, ...] or tuple[str, ...] in arguments:
        how["nargs"] = "*"
    else:
        how["type"] = arguments[0] if arguments else type_
    if default not in (None, (), False, MISSING):
        text += f" (default: {default})"
    parser.add_argument(
        f"--{field.name.replace('_', '-')}", required=default is MISSING, default=default, help=text, **how
    )


def _summary(report: Report, config: PrepareConfig, duration_s: float) -> str:
    counts, num_bytes = report.removed.counts, sum(given.num_bytes for given in report.inputs)
    lines = [*report.notes, f"{report.num_read:,} rows read"]
    lines += [f"{counts[reason]:,} dropped: {reason}" for reason in REASONS if counts[reason]]
    lines += [f"{counts[reason]:,} rows: {reason}" for reason in (CONFLICT, CONTAMINATED_KEPT) if counts[reason]]
    if missing := report.num_kept - report.num_ground_truths:
        lines.append(f"{missing:,} rows have no ground truth: rewards of answers refuse them (plinth grpo, plinth ppo)")
    lines += [f"{config.out}/{output.name}: {output.num_rows:,} rows" for output in report.outputs]
    speed = num_bytes / _MIB / max(duration_s, 1e-3)
    lines.append(f"{config.out}/card.html describes them ({num_bytes / _MIB:,.1f} MiB read in {duration_s:.1f} s, "
                 f"{speed:.1f} MiB/s)")  # fmt: skip
    return "\n".join(lines)
