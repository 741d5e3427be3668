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

from ds_engine.deepspeed_keys import OWNED
from run_kit import ConfigError, load_config

from ..errors import InputError
from ..job_config import JobConfig
from ..supervised_job_config import PreferenceJobConfig, SupervisedJobConfig

AppName = Literal["grpo", "ppo", "distill", "sft", "dpo", "reward"]
Kind = Literal["mapped", "not needed", "refused"]

_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NODES = "Ray starts the ranks of all nodes (trainer.ray_address; plinth slurm --nodes=N APP)"
_BATCH = "computed from batch sizes and ranks; give batch.mini_batch_size (prompts), in SFT supervised.batch_size"
_NOT_NEEDED = {
    "distributed_type": "DeepSpeed is the only backend",
    "compute_environment": "the same command runs everywhere",
    "main_training_function": "an app is its own script",
    "zero3_init_flag": "stage 3 always loads sharded weights",
    "gradient_accumulation_steps": _BATCH,
    "downcast_bf16": "for TPUs",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
    "enable_cpu_affinity": "set it with numactl or the scheduler",
    "steps_per_print": "every step is in metrics.tsv",
    "wall_clock_breakdown": "every phase of a step is in metrics.tsv",
    "zero_allow_untested_optimizer": "the engine sets it",
    "zero_force_ds_cpu_optimizer": "offloaded states are stepped by torch's AdamW",
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"), _NODES),
    **dict.fromkeys(("deepspeed_multinode_launcher", "deepspeed_hostfile"), _NODES),
    **dict.fromkeys(("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"), _NODES),
    **dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm"), "for TPUs"),
    **dict.fromkeys(("commands", "command_file"), "for TPUs"),
}
_REFUSED = {
    "deepspeed_moe_layer_cls_names": "experts are sharded as any other layer; there are no MoE leaf modules to name",
    "enable_msamp": "FP8 optimizers are not supported",
    "msamp_opt_level": "FP8 optimizers are not supported",
    "activation_checkpointing": "set gradient_checkpointing, checkpoint_every or checkpoint_to_cpu of the engine",
    "fsdp_config": "DeepSpeed is the only backend",
    "megatron_lm_config": "DeepSpeed is the only backend",
    "parallelism_config": "set sequence_parallel of the engine",
    "fp8_config": "FP8 training is not supported",
    "mpirun_config": "Ray starts the ranks",
}
_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")
CONFIGS: Mapping[AppName, type[JobConfig] | type[SupervisedJobConfig]] = {
    **dict.fromkeys(("grpo", "ppo", "distill"), JobConfig),
    "sft": SupervisedJobConfig,
    **dict.fromkeys(("dpo", "reward"), PreferenceJobConfig),
}
"""The configuration whose keys an app's preset may have."""


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
        return f"{self.theirs}: {text if len(text) <= 60 else text[:57] + '...'}" + (
            f": {self.why}" if self.why else ""
        )


Fate = dict[str, Any]
"""The fate of a key: the fields of its `Entry` but for the key and its value."""


def _mapped(ours: str, our_value: Any, why: str = "") -> Fate:
    return {"kind": "mapped", "ours": ours, "our_value": our_value, "why": why}


def _not_needed(why: str) -> Fate:
    return {"kind": "not needed", "why": why}


def _refused(why: str) -> Fate:
    return {"kind": "refused", "why": why}


class _Converter:
    def __init__(self, app: AppName, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype
        is_supervised = issubclass(CONFIGS[app], SupervisedJobConfig)
        self._engine = engine = "engine" if is_supervised else "actor"
        self._optim = optim = "supervised.optim" if is_supervised else "actor.optim"
        self._zero = zero = f"{engine}.zero"
        self._rules: dict[str, Callable[[Any], Fate]] = {
            # accelerate's YAML
            "num_processes": lambda v: _mapped("trainer.num_ranks", v),
            "num_machines": lambda v: (
                _mapped("trainer.ray_address", "auto", _NODES)
                if v and int(v) > 1
                else _not_needed("one host is the default")
            ),
            "mixed_precision": self._precision,
            "use_cpu": _switch("trainer.device", "cpu", "GPUs are used if there are any"),
            "debug": _switch(f"{engine}.collective_guard", "auto", "off is the default"),
            "dynamo_config": _switch(
                f"{engine}.compile",
                True,
                "not compiled",
                is_on=lambda v: bool(v) and str(v.get("dynamo_backend", "NO")).upper() != "NO",
            ),
            # its section deepspeed_config, and DeepSpeed's JSON
            "gradient_clipping": lambda v: _mapped(f"{optim}.grad_clip", float(v) or None),
            "zero3_save_16bit_model": _switch("trainer.export_model", True, "the model is not exported"),
            "train_micro_batch_size_per_gpu": lambda v: _mapped(
                f"{'' if is_supervised else 'batch.'}micro_batch_size", v
            ),
            "train_batch_size": lambda v: (
                _mapped("supervised.batch_size", v)
                if is_supervised
                else _refused("batch.mini_batch_size counts prompts: divide by sampling.n")
            ),
            "scheduler": lambda _: _refused(f"set {optim}.schedule and {optim}.warmup_steps"),
            "communication_data_type": _switch(f"{zero}.fp32_reduce", True, "the default", is_on=lambda v: v == "fp32"),
            "data_types": lambda v: _mapped(f"{zero}.fp32_grad_accum", v.get("grad_accum_dtype") == "fp32"),
            # the section zero_optimization, and accelerate's keys that stand for it
            **dict.fromkeys(("stage", "zero_stage"), self._stage_fate),
            "overlap_comm": lambda v: _mapped(f"{zero}.overlap_comm", v),
            "reduce_bucket_size": self._bucket,
            "stage3_param_persistence_threshold": lambda v: _mapped(
                f"{zero}.param_persistence_elements", int(float(v))
            ),
        }

    def entries(self, tree: Mapping[str, Any], prefix: str = "", stage: int = 2) -> Iterator[Entry]:
        """The keys of accelerate's YAML (no prefix), of its `deepspeed_config`, of DeepSpeed's JSON or a section."""
        stage = int(tree.get("stage", tree.get("zero_stage", stage)))
        for key, value in tree.items():
            name = prefix + key
            if value == "auto" and prefix:
                yield Entry(theirs=name, value=value, **_not_needed("chosen by the engine"))
            elif key == "deepspeed_config":
                yield from self.entries(value or {}, f"{name}.", stage)
            elif key == "deepspeed_config_file":
                yield Entry(theirs=name, value=value, **_not_needed("its keys are below"))
                yield from self.entries(_read_json(self._folder, str(value)), f"{Path(str(value)).name}:", stage)
            elif key == "zero_optimization":
                yield from self.entries(value, f"{name}.", stage)
            elif key in ("fp16", "bf16"):
                yield from self._section_precision(key, value, name)
            elif key == "optimizer":
                yield from self._optimizer(value, f"{name}.")
            elif key.startswith(("offload_optimizer", "offload_param")):
                yield from self._offload(key, value, name, stage)
            else:
                yield Entry(theirs=name, value=value, **self._fate(key, value, stage, is_top=not prefix))

    def _fate(self, key: str, value: Any, stage: int, *, is_top: bool) -> Fate:
        if (rule := self._rules.get(key)) is not None:
            return rule(value)
        if why := OWNED.get(key) or _NOT_NEEDED.get(key):
            return _not_needed(why)
        if not value and (is_top or key in _REFUSED):
            return _not_needed("it is empty")
        if not key.startswith("stage3_") and key not in ("sub_group_size", "ignore_unused_parameters"):
            return _refused(_REFUSED.get(key, "unknown to this command; see docs/from-verl.md"))
        if stage < 3 and key != "ignore_unused_parameters":
            return _not_needed(f"read at stage 3 only, and this is {stage}")
        return _mapped(f"{self._zero}.deepspeed.{key}", value if isinstance(value, bool) else int(float(value)))

    def _stage_fate(self, value: Any) -> Fate:
        if int(value) not in (1, 2, 3):
            return _refused("stages 1 to 3 are supported; 1 shards the optimizer states alone")
        return _mapped(f"{self._zero}.stage", int(value))

    def _bucket(self, value: Any) -> Fate:
        size = int(float(value)) * (4 if self._dtype == "float32" else 2)
        return _mapped(f"{self._zero}.reduce_bucket_bytes", max(1024, size), f"elements of {self._dtype} as bytes")

    def _offload(self, key: str, value: Any, name: str, stage: int) -> Iterator[Entry]:
        part_name = "optimizer" if key.startswith("offload_optimizer") else "param"
        ours = f"{self._zero}.offload"
        if isinstance(value, Mapping):  # DeepSpeed's section; accelerate has flat keys
            for inner, part in value.items():
                if inner in ("device", "nvme_path"):
                    yield from self._offload(f"offload_{part_name}_{inner}", part, f"{name}.{inner}", stage)
                else:
                    yield Entry(theirs=f"{name}.{inner}", value=part, **_not_needed("the engine chooses it"))
            return
        fate = _mapped(f"{ours}.{part_name}", value or "none")
        if key.endswith("nvme_path"):
            is_none = value in (None, "none", "None")
            fate = _not_needed("nothing is on NVMe") if is_none else _mapped(f"{ours}.nvme_path", value)
        elif part_name == "param" and stage < 3 and value not in (None, "none"):
            fate = _not_needed(f"DeepSpeed ignores it at stage {stage}")
        yield Entry(theirs=name, value=value, **fate)

    def _optimizer(self, section: Mapping[str, Any], prefix: str) -> Iterator[Entry]:
        kind = section.get("type")
        if kind not in ("Adam", "AdamW"):
            yield Entry(theirs=prefix[:-1], value=section, **_refused("the engine's optimizer is AdamW"))
            return
        yield Entry(theirs=f"{prefix}type", value=kind, **_not_needed("the engine's optimizer is AdamW"))
        for key, value in (section.get("params") or {}).items():
            fate = _refused(f"no key of {self._optim}")
            if value == "auto":
                fate = _not_needed("our default applies")
            elif key in _OPTIMIZER:
                fate = _mapped(f"{self._optim}.{key}", value)
            yield Entry(theirs=f"{prefix}params.{key}", value=value, **fate)

    def _precision(self, value: Any) -> Fate:
        word = "no" if value is False else str(value)  # YAML reads a bare no as false
        known = _mapped(f"{self._engine}.dtype", _DTYPES.get(word))
        return known if word in _DTYPES else _refused("allowed: no, fp16, bf16")

    def _section_precision(self, key: str, value: Mapping[str, Any], name: str) -> Iterator[Entry]:
        for inner, part in value.items():
            fate = _not_needed("the engine scales the loss" if inner != "enabled" else "mixed_precision decides")
            if inner == "enabled" and part is True:
                fate = _mapped(f"{self._engine}.dtype", _DTYPES[key])
            yield Entry(theirs=f"{name}.{inner}", value=part, **fate)


def _switch(ours: str, our_value: Any, off: str, *, is_on: Callable[[Any], bool] = bool) -> Callable[[Any], Fate]:
    """The rule of a key that is mapped if it is on, and not needed if it is `off`."""
    return lambda value: _mapped(ours, our_value) if is_on(value) else _not_needed(off)


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
    word = "no" if tree.get("mixed_precision", "bf16") is False else str(tree.get("mixed_precision", "bf16"))
    converter = _Converter(app, file.parent, _DTYPES.get(word, "bfloat16"))
    try:
        return list(converter.entries(tree))
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
