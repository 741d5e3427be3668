"""Prepares data sets for training: one schema, a split, no duplicates, no held-out prompts, and a data card.

    $ plinth prepare gsm8k/train.jsonl --held-out gsm8k/test.jsonl --out data
    $ plinth grpo model.path=MODEL data.train=data/train.parquet data.val=data/val.parquet

GSM8K, MATH, chat messages and verl's columns are recognized. `python -m rl_data prepare` is the same command.
"""

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from ..errors import DataError, RlDataError
from .config import PrepareConfig
from .pipeline import prepare_data


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 1 if files cannot be written, 2 for bad arguments or data, 130: Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options: dict[str, Any] = vars(make_parser().parse_args(arguments))
    prints_config = options.pop("print_config")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
        config = PrepareConfig(**{**options, **lists})
        if prints_config:
            print(json.dumps(asdict(config), indent=2))
            return 0
        report = prepare_data(config, command=shlex.join(["python", "-m", "rl_data", "prepare", *arguments]))
    except RlDataError as error:
        if isinstance(error, DataError):
            error.setting = _option(error.setting or "")
        name = f"--{error.field.replace('_', '-')}: " if error.field else ""
        print(f"error: {name}{error.explanation}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options['out']}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join([*report.summary(), f"{config.out}/card.md describes the files in {config.out}"]))
    return 0


def _option(setting: str) -> str | None:
    """The option of the command line for a key of the apps' configuration, or `key=value`; None if there is none."""
    key, _, value = setting.partition("=")
    name = key.removeprefix("data.columns.").replace("_", "-")
    return f"--{name}-column {value}".strip() if name != key else None


def make_parser() -> argparse.ArgumentParser:
    """The options are the fields of `PrepareConfig`."""
    parser = argparse.ArgumentParser(
        prog="plinth prepare",
        usage="%(prog)s FILE [FILE ...] --out FOLDER [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for one in fields(PrepareConfig):
        if one.name == "files":
            parser.add_argument("files", **one.metadata)
            continue
        name = f"--{one.name.replace('_', '-')}"
        parser.add_argument(name, required=one.default is MISSING, default=one.default, **one.metadata)
    parser.add_argument("--print-config", action="store_true", help="print all options as JSON, and do nothing else")
    return parser
