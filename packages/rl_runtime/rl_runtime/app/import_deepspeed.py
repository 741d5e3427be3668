"""Converts a config of DeepSpeed or accelerate to a preset: `plinth import-deepspeed FILE [APP]`.

FILE is DeepSpeed's JSON, also with the "auto" values of the Hugging Face Trainer, or accelerate's YAML. The preset
goes to stdout, with a comment for each key, also of the file that `deepspeed_config_file` names: its key here,
why it has no effect, or why it is refused. A warning on stderr names the refused keys; the preset loads without them,
so the exit code is 0. It is 2 without a preset: the file cannot be read, or has a value that the apps refuse.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ds_engine import EngineConfig, EngineConfigError
from ds_engine.from_deepspeed import Entry, Key, imported
from run_kit import ConfigError, load_config
from run_kit.cli import FileKey
from run_kit.config.schema import field_hints
from run_kit.config.trees import nested

from ..job_config import JobConfig
from ..supervised_job_config import PreferenceJobConfig, SupervisedJobConfig

CONFIGS: Mapping[str, type[JobConfig] | type[SupervisedJobConfig]] = {
    **dict.fromkeys(("grpo", "ppo", "distill"), JobConfig),
    "sft": SupervisedJobConfig,
    **dict.fromkeys(("dpo", "reward"), PreferenceJobConfig),
}
"""App -> the configuration whose keys its preset may have."""


def _app_rows(*, is_supervised: bool) -> dict[str, Key]:
    """Keys whose counterpart is a setting of the apps, not of the engine."""

    def switch(ours: str, value: Any, off: str, is_on: Callable[[Any], bool] = bool) -> Key:
        return Key(ours, lambda _: value, off, is_on)

    export = switch("trainer.export_model", True, "the model is not exported")
    prompts = "it counts responses, ours prompts: divide by sampling.n"
    return {
        "num_processes": Key("trainer.num_ranks"),
        "num_machines": switch("trainer.ray_address", "auto", "one host is the default", lambda v: int(v or 1) > 1),
        "use_cpu": switch("trainer.device", "cpu", "GPUs are used if there are any"),
        "zero3_save_16bit_model": export,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": export,
        "scheduler.params.total_num_steps": Key(why="the run's number of steps decides it"),
        "train_micro_batch_size_per_gpu": Key(f"{'' if is_supervised else 'batch.'}micro_batch_size"),
        "train_batch_size": Key("supervised.batch_size")
        if is_supervised
        else Key("batch.mini_batch_size", why=prompts, is_refused=True),
    }


def app_entries(file: Path, config_cls: type, section: str = "", given: Mapping[str, Any] | None = None) -> list[Entry]:
    """The fate of every key of a file in an app.

    Args:
        section: the model that the file is for, such as `critic`; empty: the first one, and the run as a whole.
        given: dotted settings of the app that override the file.

    Raises:
        EngineConfigError: see `ds_engine.from_deepspeed.imported`.
    """
    is_supervised = issubclass(config_cls, SupervisedJobConfig)
    engine = section or ("engine" if is_supervised else "actor")
    optim = "supervised.optim" if is_supervised else f"{engine}.optim"
    rows = {} if section else _app_rows(is_supervised=is_supervised)
    absolute = {key.ours for key in rows.values()}

    def own(key: str) -> str:
        if not key or key in absolute:
            return key
        return f"{optim}{key.removeprefix('optim')}" if key.startswith("optim.") else f"{engine}.{key}"

    def relative(key: str) -> str:
        return f"optim{key.removeprefix(optim)}" if key.startswith(f"{optim}.") else key.removeprefix(f"{engine}.")

    entries = imported(file, given={relative(key): value for key, value in (given or {}).items()}, further=rows)
    return [replace(entry, ours=own(entry.ours)) for entry in entries]


def preset_text(entries: Sequence[Entry], *, source: str) -> str:
    """The preset as YAML, with every key of the file in a comment."""
    tree = nested({entry.ours: entry.our_value for entry in entries if entry.fate == "mapped"})
    lines = [f"# From {source} by plinth import-deepspeed. Add the model, the data and batch sizes."]
    return "\n".join([*lines, *(entry.comment() for entry in entries), yaml.safe_dump(tree, sort_keys=False)])


def file_keys(config_cls: type, origins: dict[str, str]) -> dict[str, FileKey]:
    """`actor.deepspeed`, and the same for every other trained model of an app; the first one's is the run's as well.

    Args:
        origins: is given our key -> theirs and the file, for the settings that come from files.
    """
    sections = [name for name, hint in field_hints(config_cls).items() if hint is EngineConfig]

    def read(section: str, file: Path, given: Mapping[str, Any]) -> Mapping[str, Any]:
        key = f"{section}.deepspeed"
        try:
            entries = app_entries(file, config_cls, "" if section == sections[0] else section, given)
        except EngineConfigError as error:
            own = error.under(section) if error.field == "deepspeed" else error
            fields = {name: getattr(own, name) for name in ("field", "value", "allowed", "remedy")}
            raise ConfigError(own.problem, source=f"{key}={file}", **fields) from None
        refused = [
            ConfigError(
                entry.why,
                field=entry.theirs,
                value=entry.value,
                remedy=f"set {entry.ours}" if entry.ours else f"remove it from {file.name}",
                source=f"{key}={file}",
            )
            for entry in entries
            if entry.fate == "refused"
        ]
        if refused:
            raise ConfigError.of(refused)
        for entry in entries:
            if entry.fate == "overridden":
                print(f"{entry.ours} overrides {entry.theirs}={entry.value} of {file}", file=sys.stderr)
        mapped = [entry for entry in entries if entry.fate == "mapped"]
        origins.update({entry.ours: f"{entry.theirs} of {file}" for entry in mapped})
        return {entry.ours: entry.our_value for entry in mapped}

    doc = "the settings of a config of DeepSpeed or accelerate"
    return {f"{section}.deepspeed": FileKey(doc=doc, read=partial(read, section)) for section in sections}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the preset, and a warning that names refused keys; returns 2 for a file that cannot be converted."""
    parser = argparse.ArgumentParser(prog="plinth import-deepspeed", description=__doc__)
    parser.add_argument("file", type=Path, help="DeepSpeed's JSON file or accelerate's YAML file")
    parser.add_argument("app", nargs="?", choices=tuple(CONFIGS), default="grpo", help="the app to train with")
    options = parser.parse_args(argv)
    try:
        entries = app_entries(options.file, CONFIGS[options.app])
        overrides = [f"{one.ours}={json.dumps(one.our_value)}" for one in entries if one.fate == "mapped"]
        load_config(CONFIGS[options.app], overrides=overrides)
        print(preset_text(entries, source=options.file.name), end="")
    except (EngineConfigError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if refused := [entry.theirs for entry in entries if entry.fate == "refused"]:
        print(f"warning: the preset lacks {', '.join(refused)}; its comments say why", file=sys.stderr)
    return 0
