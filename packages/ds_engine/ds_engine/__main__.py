"""`python -m ds_engine plan MODEL --tokens N [--dp D] [section.key=value ...]`: the memory of a rank, before any start.

    $ python -m ds_engine plan path/to/model --dp 2 --tokens 16384 zero.stage=2 gradient_checkpointing=true

Keys are those of EngineConfig; MODEL is a Hugging Face folder or a config.json.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from .config import EngineConfig
from .planning.memory_plan import LOG_PROB_BYTES, estimate_memory


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; mistakes end with code 2 and what is allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    plan = parser.add_subparsers(dest="command", required=True).add_parser("plan", help="estimate the memory of a rank")
    plan.add_argument("model", help="Hugging Face folder, or config.json")
    plan.add_argument("settings", nargs="*", metavar="section.key=value", help="of EngineConfig, such as zero.stage=2")
    plan.add_argument("--tokens", type=int, required=True, help="packed tokens of a micro batch")
    plan.add_argument("--targets", type=int, help="predicted tokens among them; all by default")
    plan.add_argument("--micro-batches", type=int, default=2, help="of a mini batch; it matters whether it is one")
    plan.add_argument("--dp", type=int, default=1, help="replicas; ranks are dp x sequence_parallel")
    plan.add_argument("--head", choices=("lm", "value"), default="lm")
    plan.add_argument("--log-prob-bytes", type=int, default=LOG_PROB_BYTES, help="working memory of the log-prob op")
    args, rest = parser.parse_known_args(arguments)  # settings that follow an option are left over
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        parser.error(f"unknown options: {' '.join(unknown)}")
    try:
        estimate = estimate_memory(
            args.model,
            _configured(EngineConfig, [*args.settings, *rest]),
            dp=args.dp,
            tokens_per_micro_batch=args.tokens,
            targets_per_micro_batch=args.targets,
            num_micro_batches=args.micro_batches,
            head=args.head,
            log_prob_bytes=args.log_prob_bytes,
        )
    except ValueError as error:
        parser.error(str(error))
    print(estimate.table())


def _configured(config_class: Any, settings: Sequence[str], prefix: str = "") -> Any:
    """`config_class` with `section.key=value` of `settings`; built once, so that checks see all values together."""
    types = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    sections: dict[str, list[str]] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"{setting!r} is not key=value")
        name, dot, rest = key.partition(".")
        if name not in types or (dot and _section(types[name]) is None):
            raise ValueError(f"no such key: {prefix}{key}; there are {', '.join(types)}")
        if dot:
            sections.setdefault(name, []).append(f"{rest}={value}")
        else:
            values[name] = _value(value)
    for name, inner in sections.items():
        values[name] = _configured(_section(types[name]), inner, f"{prefix}{name}.")
    return config_class(**values)


def _section(annotation: Any) -> Any:
    """The dataclass in an annotation, `None` beside it or not."""
    candidates = (annotation, *typing.get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and dataclasses.is_dataclass(c)), None)


def _value(text: str) -> Any:
    """A number, true, false, null, a list, or else the text itself."""
    words = {"true": True, "false": False, "null": None, "none": "none"}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
