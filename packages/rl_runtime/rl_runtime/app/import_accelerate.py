"""Converts an accelerate config with DeepSpeed to a preset: `plinth import-accelerate FILE.yaml [grpo|ppo|sft]`.

The preset goes to stdout, with a comment for each key of the file: where it went, why it is not needed, or why it is
refused. A DeepSpeed JSON file that the config names (`deepspeed_config_file`) is read, too.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ds_engine.deepspeed_keys import OWNED
from run_kit import ConfigError, load_config

from ..errors import InputError
from .job_config import JobConfig
from .supervised_job_config import SupervisedJobConfig

AppName = Literal["grpo", "ppo", "sft"]
Kind = Literal["mapped", "not needed", "refused"]

_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NODES = "Ray starts the ranks of all nodes (trainer.ray_address; plinth slurm APP nodes=N)"
_BATCH = "computed from batch sizes and ranks; give batch.mini_batch_size (prompts), in SFT supervised.batch_size"
_NOT_NEEDED = {
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
_OPTIMIZER = {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What became of one key of the file."""

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


@dataclass(frozen=True, kw_only=True)
class _Converter:
    app: AppName
    folder: Path
    dtype: str

    @property
    def engine(self) -> str:
        return "engine" if self.app == "sft" else "actor"

    @property
    def optim(self) -> str:
        return "supervised.optim" if self.app == "sft" else "actor.optim"

    def file(self, tree: Mapping[str, Any]) -> Iterator[Entry]:
        """The keys of accelerate's YAML."""
        for key, value in tree.items():
            if key == "distributed_type":
                yield Entry(theirs=key, value=value, kind="not needed", why="DeepSpeed is the only backend")
            elif key == "num_processes":
                yield self._mapped(key, value, "trainer.num_ranks", value)
            elif key == "num_machines" and value and int(value) > 1:
                yield self._mapped(key, value, "trainer.ray_address", "auto", _NODES)
            elif key == "num_machines":
                yield Entry(theirs=key, value=value, kind="not needed", why="one host is the default")
            elif key == "mixed_precision":
                yield self._precision(key, value)
            elif key == "use_cpu":
                yield self._switch(key, value, "trainer.device", "cpu", "GPUs are used if there are any")
            elif key == "debug":
                yield self._switch(key, value, f"{self.engine}.collective_guard", "auto", "off is the default")
            elif key == "dynamo_config":
                uses = bool(value) and str(value.get("dynamo_backend", "NO")).upper() != "NO"
                yield self._switch(key, value, f"{self.engine}.compile", uses, "not compiled", is_on=uses)
            elif key == "deepspeed_config":
                yield from self.deepspeed(value or {}, f"{key}.")
            else:
                yield self._other(key, value)

    def deepspeed(self, tree: Mapping[str, Any], prefix: str) -> Iterator[Entry]:
        """The keys of accelerate's `deepspeed_config`, or of a DeepSpeed JSON file."""
        for key, value in tree.items():
            name = prefix + key
            if value == "auto":
                yield Entry(theirs=name, value=value, kind="not needed", why="chosen by the engine")
            elif key == "deepspeed_config_file":
                yield Entry(theirs=name, value=value, kind="not needed", why="its keys are below")
                yield from self.deepspeed(_read_json(self.folder, str(value)), f"{Path(str(value)).name}:")
            elif key == "zero_optimization":
                yield from self.zero(value, f"{name}.", tree)
            elif key in ("fp16", "bf16"):
                yield from self._section_precision(key, value, name)
            elif key == "gradient_clipping":
                yield self._mapped(name, value, f"{self.optim}.grad_clip", float(value) or None)
            elif key == "zero3_save_16bit_model":
                yield self._switch(name, value, "trainer.export_model", True, "the model is not exported")
            elif key in ("train_micro_batch_size_per_gpu", "train_batch_size"):
                yield self._batch(key, value, name)
            elif key == "optimizer":
                yield from self._optimizer(value, f"{name}.")
            elif key == "scheduler":
                why = f"set {self.optim}.schedule and {self.optim}.warmup_steps"
                yield Entry(theirs=name, value=value, kind="refused", why=why)
            elif key == "communication_data_type":
                wide = value == "fp32"
                yield self._switch(name, value, f"{self.engine}.zero.fp32_reduce", True, "the default", is_on=wide)
            elif key == "data_types":
                wide = value.get("grad_accum_dtype") == "fp32"
                yield self._mapped(name, value, f"{self.engine}.zero.fp32_grad_accum", wide)
            elif key in _NOT_NEEDED or key in _REFUSED:
                yield self._other(key, value, name)
            else:
                yield from self.zero({key: value}, prefix, tree)

    def zero(self, section: Mapping[str, Any], prefix: str, tree: Mapping[str, Any]) -> Iterator[Entry]:
        """The keys of a `zero_optimization` section, and those of accelerate that stand for them."""
        zero = f"{self.engine}.zero"
        stage = int(section.get("stage", tree.get("zero_stage", 2)))
        for key, value in section.items():
            name = prefix + key
            if value == "auto":
                yield Entry(theirs=name, value=value, kind="not needed", why="chosen by the engine")
            elif key in ("stage", "zero_stage"):
                known = int(value) in (1, 2, 3)
                why = "" if known else "stages 1 to 3 are supported; 1 shards the optimizer states alone"
                yield (
                    self._mapped(name, value, f"{zero}.stage", int(value))
                    if known
                    else Entry(theirs=name, value=value, kind="refused", why=why)
                )
            elif key.startswith(("offload_optimizer", "offload_param")):
                yield from self._offload(key, value, name, stage)
            elif key == "overlap_comm":
                yield self._mapped(name, value, f"{zero}.overlap_comm", value)
            elif key == "reduce_bucket_size":
                size = int(float(value)) * (4 if self.dtype == "float32" else 2)
                why = f"elements of {self.dtype} as bytes"
                yield self._mapped(name, value, f"{zero}.reduce_bucket_bytes", max(1024, size), why)
            elif key == "stage3_param_persistence_threshold":
                yield self._mapped(name, value, f"{zero}.param_persistence_elements", int(float(value)))
            elif key in OWNED:
                yield Entry(theirs=name, value=value, kind="not needed", why=OWNED[key])
            else:
                yield self._passed(key, value, name, stage)

    def _passed(self, key: str, value: Any, name: str, stage: int) -> Entry:
        if not key.startswith("stage3_") and key not in ("sub_group_size", "ignore_unused_parameters"):
            return Entry(theirs=name, value=value, kind="refused", why="unknown to this command; see docs/from-verl.md")
        if stage < 3 and key != "ignore_unused_parameters":
            return Entry(theirs=name, value=value, kind="not needed", why=f"read at stage 3 only, and this is {stage}")
        value_ = value if isinstance(value, bool) else int(float(value))
        return self._mapped(name, value, f"{self.engine}.zero.deepspeed.{key}", value_)

    def _offload(self, key: str, value: Any, name: str, stage: int) -> Iterator[Entry]:
        what = "optimizer" if key.startswith("offload_optimizer") else "param"
        ours = f"{self.engine}.zero.offload"
        if isinstance(value, Mapping):  # DeepSpeed's section; accelerate has flat keys
            for inner, part in value.items():
                if inner in ("device", "nvme_path"):
                    yield from self._offload(f"offload_{what}_{inner}", part, f"{name}.{inner}", stage)
                else:
                    yield Entry(theirs=f"{name}.{inner}", value=part, kind="not needed", why="the engine chooses it")
        elif key.endswith("nvme_path"):
            if value in (None, "none", "None"):
                yield Entry(theirs=name, value=value, kind="not needed", why="nothing is on NVMe")
            else:
                yield self._mapped(name, value, f"{ours}.nvme_path", value)
        elif what == "param" and stage < 3 and value not in (None, "none"):
            yield Entry(theirs=name, value=value, kind="not needed", why=f"DeepSpeed ignores it at stage {stage}")
        else:
            yield self._mapped(name, value, f"{ours}.{what}", value or "none")

    def _optimizer(self, section: Mapping[str, Any], prefix: str) -> Iterator[Entry]:
        kind = section.get("type")
        if kind not in ("Adam", "AdamW"):
            yield Entry(theirs=prefix[:-1], value=section, kind="refused", why="the engine's optimizer is AdamW")
            return
        yield Entry(theirs=f"{prefix}type", value=kind, kind="not needed", why="the engine's optimizer is AdamW")
        for key, value in (section.get("params") or {}).items():
            name = f"{prefix}params.{key}"
            if value == "auto":
                yield Entry(theirs=name, value=value, kind="not needed", why="our default applies")
            elif key in _OPTIMIZER:
                yield self._mapped(name, value, f"{self.optim}.{_OPTIMIZER[key]}", value)
            else:
                yield Entry(theirs=name, value=value, kind="refused", why=f"no key of {self.optim}")

    def _batch(self, key: str, value: Any, name: str) -> Entry:
        if key == "train_micro_batch_size_per_gpu":
            ours = "micro_batch_size" if self.app == "sft" else "batch.micro_batch_size"
            return self._mapped(name, value, ours, value)
        if self.app == "sft":
            return self._mapped(name, value, "supervised.batch_size", value)
        why = "batch.mini_batch_size counts prompts: divide by sampling.n"
        return Entry(theirs=name, value=value, kind="refused", why=why)

    def _precision(self, name: str, value: Any) -> Entry:
        word = "no" if value is False else str(value)  # YAML reads a bare no as false
        if word not in _DTYPES:
            return Entry(theirs=name, value=value, kind="refused", why="allowed: no, fp16, bf16")
        return self._mapped(name, value, f"{self.engine}.dtype", _DTYPES[word])

    def _section_precision(self, key: str, value: Mapping[str, Any], name: str) -> Iterator[Entry]:
        for inner, part in value.items():
            if inner != "enabled":
                yield Entry(theirs=f"{name}.{inner}", value=part, kind="not needed", why="the engine scales the loss")
            elif part is True:
                yield self._mapped(f"{name}.enabled", part, f"{self.engine}.dtype", _DTYPES[key])
            else:
                yield Entry(theirs=f"{name}.enabled", value=part, kind="not needed", why="mixed_precision decides")

    def _other(self, key: str, value: Any, name: str = "") -> Entry:
        name = name or key
        if key in _NOT_NEEDED:
            return Entry(theirs=name, value=value, kind="not needed", why=_NOT_NEEDED[key])
        if not value:
            return Entry(theirs=name, value=value, kind="not needed", why="it is empty")
        why = _REFUSED.get(key, "unknown to this command; see docs/from-verl.md")
        return Entry(theirs=name, value=value, kind="refused", why=why)

    def _mapped(self, name: str, value: Any, ours: str, our_value: Any, why: str = "") -> Entry:
        return Entry(theirs=name, value=value, kind="mapped", ours=ours, our_value=our_value, why=why)

    def _switch(
        self, name: str, value: Any, ours: str, our_value: Any, off: str, *, is_on: bool | None = None
    ) -> Entry:
        if bool(value) if is_on is None else is_on:
            return self._mapped(name, value, ours, our_value)
        return Entry(theirs=name, value=value, kind="not needed", why=off)


def convert(file: Path, *, app: AppName = "grpo") -> list[Entry]:
    """What becomes of every key of an accelerate config.

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
    converter = _Converter(app=app, folder=file.parent, dtype=_DTYPES.get(word, "bfloat16"))
    try:
        return list(converter.file(tree))
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
    """Prints the preset; returns 2 for a file that cannot be converted."""
    parser = argparse.ArgumentParser(prog="plinth import-accelerate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="accelerate's YAML file")
    parser.add_argument("app", nargs="?", choices=("grpo", "ppo", "sft"), default="grpo", help="the app to train with")
    options = parser.parse_args(argv)
    try:
        entries = convert(options.file, app=options.app)
        text = preset_text(entries, source=options.file.name)
        overrides = [f"{one.ours}={json.dumps(one.our_value)}" for one in entries if one.kind == "mapped"]
        load_config(SupervisedJobConfig if options.app == "sft" else JobConfig, overrides=overrides)
    except (InputError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    refused = [entry.theirs for entry in entries if entry.kind == "refused"]
    if refused:
        print(f"refused: {', '.join(refused)}; the comments say why", file=sys.stderr)
    return 0
