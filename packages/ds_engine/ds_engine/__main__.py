"""Memory planner: `plinth plan MODEL --tokens N [--dp D] [section.key=value ...]` estimates the memory per rank.

    $ plinth plan path/to/model --dp 2 --tokens 16384 zero.stage=2 gradient_checkpointing=true

Keys are those of EngineConfig; MODEL is a Hugging Face folder, OWNER/NAME of a model fetched by `hf download`, or a
config.json. An architecture that is counted is also tried, and a warning says if runs refuse it.
`python -m ds_engine plan` is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import typing
from collections.abc import Sequence
from typing import Any

import yaml

from plinth_base.model_folder import find_model_folder

from .config import EngineConfig
from .errors import EngineConfigError, ModelError
from .from_deepspeed import engine_config
from .planning.memory_plan import LOG_PROB_BYTES, estimate_memory


def main(arguments: Sequence[str] | None = None, *, command: str = "python -m ds_engine") -> None:
    """Print the estimate as a table. Invalid arguments exit with code 2 and the allowed values.

    Args:
        command: what the user typed before the subcommand, for the usage.
    """
    parser = argparse.ArgumentParser(
        prog=command, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
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
    model = str(find_model_folder(args.model))
    try:
        config = engine_config(_parsed([*args.settings, *rest]))
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
    """Reason why the engine refuses the architecture with these settings; empty if it does not."""
    from .model.loading import check_model

    try:
        check_model(model if os.path.isdir(model) else os.path.dirname(model) or ".", config, head=head)
    except (EngineConfigError, ModelError) as error:
        return str(error)
    return ""


def _parsed(settings: Sequence[str]) -> dict[str, Any]:
    """The values, which are YAML, of `section.key=value` settings."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator:
            raise EngineConfigError("it is not key=value", value=setting)
        try:
            values[key] = yaml.safe_load(text)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise EngineConfigError(f"not YAML: {str(error).splitlines()[0]}", field=key, value=text) from None
    return values


if __name__ == "__main__":
    main()
