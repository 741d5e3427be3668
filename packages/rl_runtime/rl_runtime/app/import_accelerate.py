"""Converts an accelerate config with DeepSpeed to a preset: `plinth import-accelerate FILE.yaml [APP]`.

The preset goes to stdout, with a comment for each key of the file, also of the DeepSpeed JSON that it names: its key
here, why it is not needed, or why it is refused. A warning on stderr names the refused keys; the preset loads without
them, so the exit code is 0. It is 2 without a preset: the file cannot be read, does not use DeepSpeed, or has a value
that the apps refuse.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from ds_engine.deepspeed_keys import OWNED
from run_kit import ConfigError, load_config

from ..errors import InputError
from ..job_config import JobConfig
from ..supervised_job_config import PreferenceJobConfig, SupervisedJobConfig

CONFIGS: Mapping[str, type[JobConfig] | type[SupervisedJobConfig]] = {
    **dict.fromkeys(("grpo", "ppo", "distill"), JobConfig),
    "sft": SupervisedJobConfig,
    **dict.fromkeys(("dpo", "reward"), PreferenceJobConfig),
}
"""App -> the configuration whose keys its preset may have."""


@dataclass(frozen=True)
class Key:
    """The counterpart of a key, or the reason why it has none.

    `ours` is our dotted key, in which `*` stands for theirs; `convert` makes our value. A value that is not `is_on`
    needs no counterpart, because of `why`.
    """

    ours: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    why: str = ""
    is_on: Callable[[Any], bool] = lambda _: True
    is_refused: bool = False


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fate of one key of the file: mapped to `ours`, or not needed or refused and `why`."""

    theirs: str
    value: Any
    kind: str
    ours: str = ""
    our_value: Any = None
    why: str = ""

    def comment(self) -> str:
        """The key and its fate, on one line."""
        return f"# {self.kind}: {self.theirs}: {json.dumps(self.value)[:60]}: {self.ours or self.why}"


_DTYPES = {"no": "float32", False: "float32", "fp16": "float16", "bf16": "bfloat16"}  # YAML reads a bare no as false
_SECTIONS = {  # section -> prefix of its keys in the table
    **dict.fromkeys(("deepspeed_config", "zero_optimization"), ""),
    **{key: f"{key}." for key in ("fp16", "bf16", "data_types", "optimizer")},
    **{key: f"{key}_" for key in ("offload_optimizer", "offload_param")},
    "params": "optimizer.params.",
}
_UNNEEDED = {
    "an app starts its processes, through Ray on several nodes (trainer.ray_address; plinth slurm --nodes=N APP)": (
        "distributed_type compute_environment main_training_function machine_rank main_process_* rdzv_backend "
        "same_network deepspeed_multinode_launcher deepspeed_hostfile deepspeed_*_filter mpirun_config gpu_ids"
    ),
    "computed from batch sizes and ranks": "gradient_accumulation_steps",
    "the engine decides it": "zero3_init_flag zero_allow_untested_optimizer zero_force_ds_cpu_optimizer fp16.* bf16.* "
    "ignore_unused_parameters optimizer.type offload_*_* enable_cpu_affinity steps_per_print wall_clock_breakdown",
    "its keys are below": "deepspeed_config_file",
    "for TPUs": "downcast_bf16 tpu_* commands command_file",
}
"""Reason -> keys that a preset does not need."""
_REFUSED = {
    "optim.name names one of the engine's": "optimizer",
    "set schedule and warmup_steps of the optimizer": "scheduler",
    "batch.mini_batch_size counts prompts: divide by sampling.n": "train_batch_size",
    "there is no counterpart; see docs/from-verl.md": "*",
}
"""Reason -> keys that have no counterpart; an empty value is not needed."""


def _table(app: str, stage: int, dtype: str) -> dict[str, Key]:
    """Keys of accelerate and DeepSpeed -> ours, for an engine of this stage and dtype; names may be patterns."""
    is_supervised = issubclass(CONFIGS[app], SupervisedJobConfig)
    engine, optim, batch = ("engine", "supervised.optim", "") if is_supervised else ("actor", "actor.optim", "batch.")
    zero, element_bytes = f"{engine}.zero", 4 if dtype == "float32" else 2

    def switch(ours: str, value: Any, off: str, is_on: Callable[[Any], bool] = bool) -> Key:
        return Key(ours, lambda _: value, off, is_on)  # one value of ours if theirs is on

    def elements(value: Any) -> Any:
        return value if isinstance(value, bool) else int(float(value))

    nvme = Key(f"{zero}.offload.nvme_path", str, "nothing is on NVMe", lambda v: v not in (None, "none", "None"))
    ignored = f"DeepSpeed ignores it at stage {stage}"
    zero_keys = Key(f"{zero}.deepspeed.*", elements, ignored, lambda _: stage == 3)
    table = {
        "num_processes": Key("trainer.num_ranks"),
        "num_machines": switch("trainer.ray_address", "auto", "one host is the default", lambda v: int(v or 1) > 1),
        "mixed_precision": Key(f"{engine}.dtype", lambda v: _DTYPES.get(v, v)),
        "fp16.enabled": switch(f"{engine}.dtype", "float16", "mixed_precision decides"),
        "bf16.enabled": switch(f"{engine}.dtype", "bfloat16", "mixed_precision decides"),
        "use_cpu": switch("trainer.device", "cpu", "GPUs are used if there are any"),
        "debug": switch(f"{engine}.collective_guard", "auto", "off is the default"),
        "dynamo_config": switch(f"{engine}.compile", True, "not compiled", lambda v: v.get("dynamo_backend") != "NO"),
        "gradient_clipping": Key(f"{optim}.grad_clip", lambda v: float(v) or None),
        **{f"optimizer.params.{key}": Key(f"{optim}.{key}") for key in ("lr", "betas", "eps", "weight_decay")},
        "zero3_save_16bit_model": switch("trainer.export_model", True, "the model is not exported"),
        "train_micro_batch_size_per_gpu": Key(f"{batch}micro_batch_size"),
        "communication_data_type": switch(f"{zero}.fp32_reduce", True, "the default", lambda v: v == "fp32"),
        "data_types.grad_accum_dtype": Key(f"{zero}.fp32_grad_accum", lambda v: v == "fp32"),
        **dict.fromkeys(("stage", "zero_stage"), Key(f"{zero}.stage", int)),
        "overlap_comm": Key(f"{zero}.overlap_comm"),
        "reduce_bucket_size": Key(f"{zero}.reduce_bucket_bytes", lambda v: max(1024, elements(v) * element_bytes)),
        "stage3_param_persistence_threshold": Key(f"{zero}.param_persistence_elements", elements),
        "offload_optimizer_device": Key(f"{zero}.offload.optimizer", lambda v: v or "none"),
        "offload_param_device": Key(f"{zero}.offload.param", lambda v: v or "none", ignored, lambda _: stage == 3),
        **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"), nvme),
        **({"train_batch_size": Key("supervised.batch_size")} if is_supervised else {}),
    }
    return {
        **{key: Key(why=why, is_on=bool, is_refused=True) for why, keys in _REFUSED.items() for key in keys.split()},
        **{key: Key(why=why) for key, why in OWNED.items()},
        **{key: Key(why=why) for why, keys in _UNNEEDED.items() for key in keys.split()},
        **dict.fromkeys(("stage3_*", "sub_group_size"), zero_keys),
        **table,
    }


def _flattened(tree: Mapping[str, Any], folder: Path, prefix: str = "", path: str = "") -> Iterator[tuple[Any, ...]]:
    """The keys of the file and of the JSON file that it names: dotted name, name in the table, value."""
    for key, value in tree.items():
        if key in _SECTIONS and isinstance(value, Mapping) and value.get("type", "AdamW") in ("Adam", "AdamW"):
            yield from _flattened(value, folder, f"{prefix}{key}.", _SECTIONS[key])
            continue
        yield prefix + key, path + key, value
        if key == "deepspeed_config_file":
            file = Path(value) if Path(value).is_file() else folder / value
            yield from _flattened(_read(file), folder, f"{file.name}:")


def _entry(name: str, short: str, value: Any, table: Mapping[str, Key]) -> Entry:
    """The fate of a key: of its own name in the table, or of the last pattern there that fits."""
    key = table.get(short) or [key for pattern, key in table.items() if fnmatch(short, pattern)][-1]
    key = Key(why="chosen by the engine") if value == "auto" else key
    if key.ours and key.is_on(value):
        ours = key.ours.replace("*", short)
        return Entry(theirs=name, value=value, kind="mapped", ours=ours, our_value=key.convert(value))
    kind = "refused" if key.is_refused and key.is_on(value) else "not needed"
    return Entry(theirs=name, value=value, kind=kind, why=key.why)


def convert(file: Path, *, app: str = "grpo") -> list[Entry]:
    """The fate of every key of an accelerate config. Raises InputError for a file without one that uses DeepSpeed."""
    tree = _read(file)
    backend = tree.get("distributed_type", "DEEPSPEED" if "deepspeed_config" in tree else None)
    if backend != "DEEPSPEED":
        raise InputError(f"of {file}", field="distributed_type", value=backend, allowed="DEEPSPEED")
    keys = list(_flattened(tree, file.parent))
    try:
        values = {short: value for _, short, value in keys}
        stage = int(values.get("stage", values.get("zero_stage", 2)))
        table = _table(app, stage, _DTYPES.get(values.get("mixed_precision"), "bfloat16"))
        return [_entry(name, short, value, table) for name, short, value in keys]
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{file}: a value has another type than accelerate's: {error}") from None


def _read(file: Path) -> dict[str, Any]:
    """A file of accelerate (YAML) or DeepSpeed (JSON)."""
    try:
        return dict((json.loads if file.suffix == ".json" else yaml.safe_load)(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def preset_text(entries: Sequence[Entry], *, source: str) -> str:
    """The preset as YAML, with every key of the file in a comment. Raises InputError if two keys disagree."""
    tree: dict[str, Any] = {}
    mapped: dict[str, Entry] = {}
    for entry in (entry for entry in entries if entry.kind == "mapped"):
        before = mapped.setdefault(entry.ours, entry)
        if before.our_value != entry.our_value:
            raise InputError(f"{before.theirs} and {entry.theirs} disagree about {entry.ours}; remove one of them")
        *sections, name = entry.ours.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), sections, tree)[name] = entry.our_value
    lines = [f"# From {source} by plinth import-accelerate. Add the model, the data and batch sizes."]
    return "\n".join([*lines, *(entry.comment() for entry in entries), yaml.safe_dump(tree, sort_keys=False)])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the preset, and a warning that names refused keys; returns 2 for a file that cannot be converted."""
    parser = argparse.ArgumentParser(prog="plinth import-accelerate", description=__doc__)
    parser.add_argument("file", type=Path, help="accelerate's YAML file")
    parser.add_argument("app", nargs="?", choices=tuple(CONFIGS), default="grpo", help="the app to train with")
    options = parser.parse_args(argv)
    try:
        entries = convert(options.file, app=options.app)
        overrides = [f"{one.ours}={json.dumps(one.our_value)}" for one in entries if one.kind == "mapped"]
        load_config(CONFIGS[options.app], overrides=overrides)
        print(preset_text(entries, source=options.file.name), end="")
    except (InputError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if refused := [entry.theirs for entry in entries if entry.kind == "refused"]:
        print(f"warning: the preset lacks {', '.join(refused)}; its comments say why", file=sys.stderr)
    return 0
