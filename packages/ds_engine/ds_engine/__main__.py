"""Memory planner: `plinth plan MODEL --tokens N [--dp D] [section.key=value ...]` estimates the memory per rank.

    $ plinth plan path/to/model --dp 2 --tokens 16384 zero.stage=2 gradient_checkpointing=true

Keys are those of EngineConfig; MODEL is a Hugging Face folder, OWNER/NAME of a model fetched by `hf download`, or a
config.json. An architecture that is counted is also tried, and a warning says if runs refuse it.
`python -m ds_engine plan` is the same.
`python -m ds_engine doctor` lists the private parts of other packages that this one relies on, and their state here.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import math
import os
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plinth_base.errors import prefix_fields
from plinth_base.model_folder import find_model_folder

from .config import EngineConfig
from .errors import EngineConfigError, ModelError
from .planning.memory_plan import LOG_PROB_BYTES, estimate_memory
from .upstream import report


def main(arguments: Sequence[str] | None = None, *, command: str = "python -m ds_engine") -> None:
    """Print the estimate as a table. Invalid arguments exit with code 2 and the allowed values.

    Args:
        command: what the user typed before the subcommand, for the usage.
    """
    parser = argparse.ArgumentParser(
        prog=command, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="list what this package needs of DeepSpeed, torch, transformers and PEFT")
    plan = commands.add_parser("plan", help="estimate the memory per rank")
    plan.add_argument("model", help="Hugging Face folder, OWNER/NAME after `hf download OWNER/NAME`, or config.json")
    plan.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="of EngineConfig, such as zero.stage=2"
    )
    plan.add_argument("--tokens", type=int, required=True, help="packed tokens per micro batch")
    plan.add_argument("--targets", type=int, help="targets per micro batch; by default all tokens")
    plan.add_argument("--micro-batches", type=int, default=2, help="per mini batch; 2 stands for any larger number")
    plan.add_argument("--dp", type=int, default=1, help="replicas; there are dp x sequence_parallel ranks")
    plan.add_argument("--head", choices=("lm", "value"), default="lm")
    plan.add_argument("--log-prob-bytes", type=int, default=LOG_PROB_BYTES, help="working memory of the log-prob op")
    args, rest = parser.parse_known_args(arguments)  # settings after an option are in rest
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        parser.error(f"unknown options: {' '.join(unknown)}")
    if args.command == "doctor":
        print(report())
        return
    model = str(find_model_folder(args.model))
    try:
        config = _configured(EngineConfig, [*args.settings, *rest])
        estimate = estimate_memory(
            model,
            config,
            dp=args.dp,
            tokens_per_micro_batch=args.tokens,
            targets_per_micro_batch=args.targets,
            num_micro_batches=args.micro_batches,
            head=args.head,
            log_prob_bytes=args.log_prob_bytes,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(estimate.table(), flush=True)
    if not estimate.is_exact and (problem := _refusal(model, config, args.head)):
        print(f"warning: runs refuse this model: {problem}", file=sys.stderr)


def plan(argv: Sequence[str]) -> None:
    """The command `plinth plan`."""
    main(["plan", *argv], command="plinth")


def _refusal(model: str, config: EngineConfig, head: typing.Literal["lm", "value"]) -> str:
    """Why the engine refuses the architecture with these settings; empty if it does not."""
    from .model.loading import check_model

    try:
        check_model(model if os.path.isdir(model) else os.path.dirname(model) or ".", config, head=head)
    except (EngineConfigError, ModelError) as error:
        return str(error)
    return ""


def _configured(config_class: Any, settings: Sequence[str], prefix: str = "") -> Any:
    """Build `config_class` once with all `section.key=value` settings, so that checks see all values together."""
    types = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    sections: dict[str, list[str]] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise EngineConfigError("it is not key=value", value=setting)
        name, dot, rest = key.partition(".")
        if name not in types or (dot and _section(types[name]) is None):
            problem = f"unknown key{_nearest(prefix + key)}"
            raise EngineConfigError(problem, field=prefix + key, allowed=", ".join(types))
        if dot:
            sections.setdefault(name, []).append(f"{rest}={value}")
        else:
            values[name] = _value(prefix + key, value, types[name])
    for name, inner in sections.items():
        values[name] = _configured(_section(types[name]), inner, f"{prefix}{name}.")
    with prefix_fields(prefix.removesuffix(".")):
        return config_class(**values)


def _nearest(key: str) -> str:
    """`; nearest: KEY` for an unknown key, also for one of an app (`actor.zero.stage`); empty if none is near."""
    known = list(_paths(EngineConfig))
    inner = key.partition(".")[2]
    near = [inner] if inner in known else difflib.get_close_matches(key, known, n=1)
    return f"; nearest: {near[0]}" if near else ""


def _paths(config_class: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys."""
    for name, annotation in typing.get_type_hints(config_class).items():
        section = _section(annotation)
        yield from [prefix + name] if section is None else _paths(section, f"{prefix}{name}.")


def _section(annotation: Any) -> Any:
    """The dataclass in an annotation `C` or `C | None`; otherwise None."""
    candidates = (annotation, *typing.get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and dataclasses.is_dataclass(c)), None)


def _value(key: str, text: str, annotation: Any) -> Any:
    """The number, true, false, null, list or text that `text` is, whichever fits the annotation."""
    words = {"true": True, "false": False, "null": None}
    try:
        value = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    for candidate in (tuple(value) if isinstance(value, list) else value, text, (value,), (text,)):
        if _fits(candidate, annotation):
            return candidate
    raise EngineConfigError(field=key, value=text, allowed=_allowed(annotation))


def _allowed(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    return "one of its keys, as in key.name=value" if _section(annotation) else str(annotation).removeprefix("typing.")


def _fits(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in arguments)
    if origin is tuple:
        items = arguments[:1] * len(value) if isinstance(value, tuple) and ... in arguments else arguments
        return isinstance(value, tuple) and len(value) == len(items) and all(map(_fits, value, items))
    if origin is Mapping:
        return isinstance(value, dict) and all(
            _fits(part, hint) for pair in value.items() for part, hint in zip(pair, arguments, strict=True)
        )
    if arguments:  # a union
        return any(_fits(value, member) for member in arguments)
    if annotation is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is annotation


if __name__ == "__main__":
    main()
