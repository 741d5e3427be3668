"""Converts an accelerate config with DeepSpeed to a preset: `plinth import-accelerate FILE.yaml [APP]`.

The preset goes to stdout, with a comment for each key of the file: where it went, why it is not needed, or why it is
refused. A warning on stderr names the refused keys; the preset loads without them, so the exit code is 0. It is 2
without a preset: the file cannot be read, does not use DeepSpeed, or has a value that the apps refuse. A DeepSpeed JSON
file that the config names (`deepspeed_config_file`) is read, too.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ds_engine.deepspeed_keys import OWNED, needs_stage_3
from run_kit import ConfigError, load_config

from ..errors import InputError
from ..job_config import JobConfig
from ..supervised_job_config import PreferenceJobConfig, SupervisedJobConfig

AppName = Literal["grpo", "ppo", "distill", "sft", "dpo", "reward"]
Kind = Literal["mapped", "not needed", "refused"]

_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
CONFIGS: Mapping[AppName, type[JobConfig] | type[SupervisedJobConfig]] = {
    **dict.fromkeys(("grpo", "ppo", "distill"), JobConfig),
    "sft": SupervisedJobConfig,
    **dict.fromkeys(("dpo", "reward"), PreferenceJobConfig),
}
"""The configuration whose keys an app's preset may have."""
_NODES = "Ray starts the ranks of all nodes (trainer.ray_address; plinth slurm --nodes=N APP)"
_BATCH = "computed from batch sizes and ranks; give batch.mini_batch_size (prompts), in SFT supervised.batch_size"
_UNNEEDED = {
    "DeepSpeed is the only backend": "distributed_type",
    "the same command runs everywhere": "compute_environment",
    "an app is its own script": "main_training_function",
    "stage 3 always loads sharded weights": "zero3_init_flag",
    _BATCH: "gradient_accumulation_steps",
    "set CUDA_VISIBLE_DEVICES": "gpu_ids",
    "set it with numactl or the scheduler": "enable_cpu_affinity",
    "metrics.tsv has every step and phase": "steps_per_print wall_clock_breakdown",
    "the engine sets it": "zero_allow_untested_optimizer",
    "offloaded states are stepped by torch's AdamW": "zero_force_ds_cpu_optimizer",
    "optim.name=adamw is the default": "optimizer.type",
    "its keys are below": "deepspeed_config_file",
    _NODES: "machine_rank main_process_ip main_process_port rdzv_backend same_network deepspeed_multinode_launcher "
    "deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter",
    "for TPUs": "downcast_bf16 tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm commands command_file",
}
"""Reason -> keys that a preset does not need."""
_REFUSED = {
    "experts are sharded as any other layer; there are no MoE leaf modules to name": "deepspeed_moe_layer_cls_names",
    "FP8 training is not supported": "enable_msamp msamp_opt_level fp8_config",
    "set gradient_checkpointing, checkpoint_every or checkpoint_to_cpu of the engine": "activation_checkpointing",
    "DeepSpeed is the only backend": "fsdp_config megatron_lm_config",
    "set sequence_parallel of the engine": "parallelism_config",
    "Ray starts the ranks": "mpirun_config",
    "optim.name names one of the engine's": "optimizer",
    "set schedule and warmup_steps of the optimizer": "scheduler",
    "batch.mini_batch_size counts prompts: divide by sampling.n": "train_batch_size",
}
"""Reason -> keys that have no counterpart."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fate of one key of the file."""

    theirs: str
    """Dotted key."""
    value: Any
    kind: Kind
    ours: str = ""
    """Dotted key of the preset, if it is mapped."""
    our_value: Any = None
    why: str = ""

    def comment(self) -> str:
        """The key and its fate, on one line."""
        text = json.dumps(self.value)
        shown = f"{self.theirs}: {text if len(text) <= 60 else text[:57] + '...'}"
        return f"{shown}: {self.why}" if self.why else shown


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A key's counterpart; a key without one is refused, or not needed."""

    ours: str
    convert: Callable[[Any], Any] = lambda value: value
    """Our value; a LookupError refuses theirs."""
    is_on: Callable[[Any], bool] = lambda _: True
    """False for a value that a preset does not need."""
    off: str = ""
    """Why it does not."""
    allowed: str = ""
    why: str = ""


def _rules(app: AppName, dtype: str, stage: int) -> dict[str, _Rule]:
    """Accelerate's keys and DeepSpeed's -> ours, for an engine of this dtype and stage."""
    is_supervised = issubclass(CONFIGS[app], SupervisedJobConfig)
    engine, optim = ("engine", "supervised.optim") if is_supervised else ("actor", "actor.optim")
    zero, element_bytes = f"{engine}.zero", 4 if dtype == "float32" else 2
    stages = _Rule(ours=f"{zero}.stage", convert=lambda v: {1: 1, 2: 2, 3: 3}[int(v)], allowed="1 to 3")
    rules = {
        "num_processes": _Rule(ours="trainer.num_ranks"),
        "num_machines": _switch("trainer.ray_address", "auto", "one host is the default", lambda v: int(v or 1) > 1),
        "mixed_precision": _Rule(ours=f"{engine}.dtype", convert=_dtype, allowed=", ".join(_DTYPES)),
        "fp16.enabled": _switch(f"{engine}.dtype", "float16", "mixed_precision decides"),
        "bf16.enabled": _switch(f"{engine}.dtype", "bfloat16", "mixed_precision decides"),
        "use_cpu": _switch("trainer.device", "cpu", "GPUs are used if there are any"),
        "debug": _switch(f"{engine}.collective_guard", "auto", "off is the default"),
        "dynamo_config": _switch(f"{engine}.compile", True, "not compiled", _has_dynamo),
        "gradient_clipping": _Rule(ours=f"{optim}.grad_clip", convert=lambda v: float(v) or None),
        **{f"optimizer.params.{key}": _Rule(ours=f"{optim}.{key}") for key in ("lr", "betas", "eps", "weight_decay")},
        "zero3_save_16bit_model": _switch("trainer.export_model", True, "the model is not exported"),
        "train_micro_batch_size_per_gpu": _Rule(ours=f"{'' if is_supervised else 'batch.'}micro_batch_size"),
        "communication_data_type": _switch(f"{zero}.fp32_reduce", True, "the default", lambda v: v == "fp32"),
        "data_types.grad_accum_dtype": _Rule(ours=f"{zero}.fp32_grad_accum", convert=lambda v: v == "fp32"),
        "stage": stages,
        "zero_stage": stages,
        "overlap_comm": _Rule(ours=f"{zero}.overlap_comm"),
        "reduce_bucket_size": _Rule(
            ours=f"{zero}.reduce_bucket_bytes",
            convert=lambda v: max(1024, int(float(v)) * element_bytes),
            why=f"elements of {dtype} as bytes",
        ),
        "stage3_param_persistence_threshold": _Rule(
            ours=f"{zero}.param_persistence_elements", convert=lambda v: int(float(v))
        ),
        "offload_optimizer_device": _Rule(ours=f"{zero}.offload.optimizer", convert=lambda v: v or "none"),
        "offload_param_device": _Rule(
            ours=f"{zero}.offload.param",
            convert=lambda v: v or "none",
            is_on=lambda v: stage == 3 or v in (None, "none"),
            off=f"DeepSpeed ignores it at stage {stage}",
        ),
    }
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        rules[key] = _Rule(
            ours=f"{zero}.offload.nvme_path", is_on=lambda v: v not in (None, "none", "None"), off="nothing is on NVMe"
        )
    if is_supervised:
        rules["train_batch_size"] = _Rule(ours="supervised.batch_size")
    return rules


def _switch(ours: str, our_value: Any, off: str, is_on: Callable[[Any], bool] = bool) -> _Rule:
    """A key that is mapped to one value if it is on."""
    return _Rule(ours=ours, convert=lambda _: our_value, is_on=is_on, off=off)


def _dtype(value: Any) -> str:
    return _DTYPES["no" if value is False else str(value)]  # YAML reads a bare no as false


def _has_dynamo(value: Any) -> bool:
    return bool(value) and str(value.get("dynamo_backend", "NO")).upper() != "NO"


def _flattened(
    tree: Mapping[str, Any], folder: Path, prefix: str = "", path: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """The keys of the file and of the JSON file that it names: dotted name, key of the rules, value."""
    for key, value in tree.items():
        name, rule = prefix + key, path + key
        if key == "deepspeed_config_file":
            yield name, rule, value
            yield from _flattened(_read_json(folder, str(value)), folder, f"{Path(str(value)).name}:")
        elif key in ("deepspeed_config", "zero_optimization"):
            yield from _flattened(value or {}, folder, f"{name}.")
        elif key in ("fp16", "bf16", "data_types", "params"):
            yield from _flattened(value or {}, folder, f"{name}.", f"{rule}.")
        elif key in ("offload_optimizer", "offload_param") and isinstance(value, Mapping):
            yield from _flattened(value, folder, f"{name}.", f"{rule}_")  # accelerate has flat keys for them
        elif key == "optimizer" and value.get("type") in ("Adam", "AdamW"):
            yield from _flattened(value, folder, f"{name}.", f"{rule}.")
        else:
            yield name, rule, value


def _entry(name: str, key: str, value: Any, rule: _Rule | None, engine: str, stage: int) -> Entry:
    """The fate of a key; rules come first, then the keys that the engine owns, then DeepSpeed's own of ZeRO."""
    if value == "auto" and name != key:
        return Entry(theirs=name, value=value, kind="not needed", why="chosen by the engine")
    if rule is not None and not rule.is_on(value):
        return Entry(theirs=name, value=value, kind="not needed", why=rule.off)
    if rule is not None:
        try:
            our_value = rule.convert(value)
        except LookupError:
            return Entry(theirs=name, value=value, kind="refused", why=f"allowed: {rule.allowed}")
        return Entry(theirs=name, value=value, kind="mapped", ours=rule.ours, our_value=our_value, why=rule.why)
    if why := OWNED.get(key) or _reason(_UNNEEDED, key):
        return Entry(theirs=name, value=value, kind="not needed", why=why)
    refusal = _reason(_REFUSED, key)
    if not value and (refusal or name == key):
        return Entry(theirs=name, value=value, kind="not needed", why="it is empty")
    if key.startswith(("fp16.", "bf16.", "offload_")):
        return Entry(theirs=name, value=value, kind="not needed", why="the engine chooses it")
    if not needs_stage_3(key) and key != "ignore_unused_parameters":
        return Entry(theirs=name, value=value, kind="refused", why=refusal or "unknown; see docs/from-verl.md")
    if stage < 3 and needs_stage_3(key):
        return Entry(theirs=name, value=value, kind="not needed", why=f"read at stage 3 only, and this is {stage}")
    our_value = value if isinstance(value, bool) else int(float(value))
    return Entry(theirs=name, value=value, kind="mapped", ours=f"{engine}.zero.deepspeed.{key}", our_value=our_value)


def _reason(keys: Mapping[str, str], key: str) -> str:
    return next((reason for reason, names in keys.items() if key in names.split()), "")


def convert(file: Path, *, app: AppName = "grpo") -> list[Entry]:
    """The fate of every key of an accelerate config.

    Raises:
        InputError: the file cannot be read, or does not use DeepSpeed.
    """
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(tree, dict) or ("deepspeed_config" not in tree and "distributed_type" not in tree):
        raise InputError(f"{file} is no accelerate config: it has neither distributed_type nor deepspeed_config")
    if tree.get("distributed_type", "DEEPSPEED") != "DEEPSPEED":
        raise InputError(f"{file}: distributed_type is {tree['distributed_type']}; allowed: DEEPSPEED")
    try:
        keys = list(_flattened(tree, file.parent))
        values = {key: value for _, key, value in keys}
        stage = int(values.get("stage", values.get("zero_stage", 2)))
        precision = values.get("mixed_precision", "bf16")
        dtype = _DTYPES.get("no" if precision is False else str(precision), "bfloat16")
        rules = _rules(app, dtype, stage)
        engine = "engine" if issubclass(CONFIGS[app], SupervisedJobConfig) else "actor"
        return [_entry(name, key, value, rules.get(key), engine, stage) for name, key, value in keys]
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{file}: a value has another type than accelerate's: {error}") from None


def preset_text(entries: Sequence[Entry], *, source: str) -> str:
    """The preset as YAML, with every key of the file in a comment.

    Raises:
        InputError: two keys disagree.
    """
    tree: dict[str, Any] = {}
    for entry in entries:
        if entry.kind == "mapped":
            _insert(tree, entry)
    lines = [f"# From {source} by plinth import-accelerate. Add the model, the data and batch sizes."]
    lines += [f"# {entry.kind}: {entry.comment()}" for entry in entries if entry.kind != "mapped"]
    return "\n".join([*lines, *_lines(tree, "")]) + "\n"


def _insert(tree: dict[str, Any], entry: Entry) -> None:
    *sections, name = entry.ours.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    before = tree.get(name)
    if before is not None and before.our_value != entry.our_value:
        raise InputError(f"{before.comment()} and {entry.comment()} disagree about {entry.ours}; remove one of them")
    tree[name] = before or entry


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Entry):
            yield f"{indent}{key}: {json.dumps(value.our_value)}  # {value.comment()}"
        else:
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")


def _read_json(folder: Path, name: str) -> Mapping[str, Any]:
    """A DeepSpeed config, relative to the current folder as accelerate reads it, or to the YAML file."""
    path = next((path for path in (Path(name), folder / name) if path.is_file()), None)
    if path is None:
        raise InputError(f"deepspeed_config_file is {name}, which does not exist; allowed: a JSON file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"deepspeed_config_file is {name}, which is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"deepspeed_config_file is {name}; allowed: a JSON object")
    return content


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the preset, and a warning that names refused keys; returns 2 for a file that cannot be converted."""
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="plinth import-accelerate", description=first, epilog=rest)
    parser.add_argument("file", type=Path, help="accelerate's YAML file")
    parser.add_argument("app", nargs="?", choices=tuple(CONFIGS), default="grpo", help="the app to train with")
    options = parser.parse_args(argv)
    try:
        entries = convert(options.file, app=options.app)
        text = preset_text(entries, source=options.file.name)
        overrides = [f"{one.ours}={json.dumps(one.our_value)}" for one in entries if one.kind == "mapped"]
        load_config(CONFIGS[options.app], overrides=overrides)
    except (InputError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    refused = [entry.theirs for entry in entries if entry.kind == "refused"]
    if refused:
        print(f"warning: the preset lacks {', '.join(refused)}; its comments say why", file=sys.stderr)
    return 0
