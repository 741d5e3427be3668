"""Reads a config of DeepSpeed (JSON, as the Hugging Face Trainer takes it too) or accelerate (YAML). Imports no torch.

One table says of every key which of ours it is, why it has no effect, or why it is refused. `config_from_deepspeed`
makes an EngineConfig; `imported` returns the fate of each key for whoever has further settings, such as the apps.
"""

import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from plinth_base.dtypes import DTYPE_BYTES

from .config import EngineConfig
from .deepspeed_keys import HPZ, OWNED
from .errors import EngineConfigError

Fate = Literal["mapped", "open", "overridden", "no effect", "refused"]
"""open: the file leaves the choice to the Trainer ("auto"). overridden: the same setting was given beside the file."""


@dataclass(frozen=True)
class Key:
    """Our counterpart of a key, or the reason why it has none."""

    ours: str = ""
    """Dotted key of EngineConfig. With a reason for refusal: the key to set instead."""
    convert: Callable[[Any], Any] = lambda value: value
    """Our value."""
    why: str = ""
    """Reason why a value has no effect, or is refused."""
    is_on: Callable[[Any], bool] = lambda _: True
    """False for a value that asks for nothing."""
    is_refused: bool = False
    note: str = ""
    """Difference between theirs and ours."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fate of one key of the file."""

    theirs: str
    value: Any
    fate: Fate
    ours: str = ""
    our_value: Any = None
    why: str = ""

    def comment(self) -> str:
        """The key and its fate, on one line."""
        counterpart = "; ".join(filter(None, (self.ours, self.why)))
        return f"# {self.fate}: {self.theirs}: {json.dumps(self.value, default=str)[:60]}: {counterpart}"


_DTYPES = {"no": "float32", False: "float32", "fp16": "float16", "bf16": "bfloat16"}  # YAML reads a bare no as false
_OPTIMIZERS = ("adam", "adamw", "sgd", "muon", "adam8bit")
_DEEPSPEEDS_OWN = ("lamb", "lion", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam", "cpuadam")
"""Optimizers that DeepSpeed has itself. Every other name is a class of torch.optim."""
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OFFLOAD_DEVICES = ("zero_optimization.offload_", "offload_", "zero.offload.")
_SECTIONS = (
    *("deepspeed_config", "zero_optimization", "fp16", "bf16", "bfloat16", "data_types"),
    *("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params", "compile"),
)
_NO_EFFECT = {
    "whoever starts the ranks decides it (the apps: trainer.num_ranks, on several nodes trainer.ray_address)": (
        "distributed_type compute_environment main_training_function machine_rank main_process_ip main_process_port "
        "rdzv_backend same_network deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter "
        "deepspeed_exclusion_filter mpirun_config gpu_ids num_processes num_machines use_cpu enable_cpu_affinity"
    ),
    "each call gives its own batches": "train_batch_size train_micro_batch_size_per_gpu",
    "it follows from the ranks and from the batch size, which you give (the apps: batch.mini_batch_size, "
    "supervised.batch_size)": "gradient_accumulation_steps is_train_batch_min dataloader_drop_last",
    "the engine decides it": "zero3_init_flag zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "zero_optimization.ignore_unused_parameters disable_allgather disable_python_gc bf16.immediate_grad_update "
    "bf16.check_grad_overflow optimizer.params.torch_adam optimizer.params.fused optimizer.legacy_fusion "
    "optimizer.params.foreach scheduler.params.last_batch_iteration checkpoint nebula "
    "seq_parallel_communication_data_type",
    "the engine has a dynamic loss scale of its own": "fp16.initial_scale_power fp16.loss_scale_window "
    "fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale bf16.initial_scale_power bf16.loss_scale "
    "bf16.loss_scale_window bf16.hysteresis bf16.min_loss_scale",
    "it only prints; steps have metrics of their own": "steps_per_print wall_clock_breakdown memory_breakdown "
    "dump_state timers log_level vocabulary_size zero_optimization.log_trace_cache_warnings",
    "Hugging Face models do not call deepspeed.checkpointing; set gradient_checkpointing": "activation_checkpointing",
    "NVMe is read with DeepSpeed's defaults": "aio",
    "torch.compile has its defaults": "compile.kwargs",
    "the engine exports whole weights at every stage": "zero3_save_16bit_model",
    "the engine gathers whole transformer layers": "deepspeed_moe_layer_cls_names transformer_moe_cls_names",
    "its keys are below": "deepspeed_config_file",
    "for TPUs": "downcast_bf16 tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone commands command_file",
}
"""Reason -> keys without effect here."""
_REFUSED = {
    "; use bf16 or fp16": "amp fp8_config torch_autocast enable_msamp msamp_opt_level fp16.auto_cast",
    "; optimizer states and master weights are fp32": "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
    "fp16.fp16_master_weights_and_grads",
    "; give the DeepSpeed or accelerate file itself": "deepspeed",
    "; the apps write metrics: tracking.wandb_project": "tensorboard wandb csv_monitor comet",
    "; the apps profile: trainer.profile_steps": "flops_profiler comms_logger",
    "; a rollout is vLLM's": "hybrid_engine",
    "; gradients are averaged by tokens": "prescale_gradients gradient_allreduce_op",
    "; ZeRO shards experts with their layers": "expert_parallel use_data_before_expert_parallelism",
    "; set lora.base_format=nf4": "quantize_training compression_training weight_quantization",
    "": "megatron_lm_config sparse_gradients sparse_attention curriculum_learning data_efficiency eigenvalue "
    "progressive_layer_drop elasticity autotuning pipeline tensor_parallel managed_gradient_accumulation "
    "optimizer.params.amsgrad",
}
"""Remedy -> features that the engine lacks; a value that switches one off has no effect."""
_OPTIONAL = ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights")
"""Keys of `OWNED` that ask for a feature; the others have no effect on the result."""


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("a number is needed")
    return float(value)


def _integer(value: Any) -> int:
    return int(_number(value))


def _switched_on(value: Any) -> bool:
    enabled = value.get("enabled", value) if isinstance(value, Mapping) else value
    return bool(enabled) and enabled != "auto"


def table(
    *,
    stage: int = 2,
    dtype: str = "bfloat16",
    reduce_dtype: str = "bfloat16",
    uses_nvme: bool = False,
    is_full_precision: bool = False,
    optimizer: str = "adamw",
    optimizer_params: Collection[str] = (),
) -> dict[str, Key]:
    """Dotted key of DeepSpeed or accelerate (of its `deepspeed_config` without that word) -> its counterpart.

    The arguments are what the other keys say.
    """
    zero, element_bytes = "zero_optimization", DTYPE_BYTES[reduce_dtype]

    def section(prefix: str, keys: Mapping[str, Key]) -> dict[str, Key]:
        return {f"{prefix}.{key}": value for key, value in keys.items()}

    def switch(ours: str, value: Any, off: str, is_on: Callable[[Any], bool] = bool) -> Key:
        return Key(ours, lambda _: value, off, is_on)

    def lacks(why: str, is_on: Callable[[Any], bool] = _switched_on, ours: str = "") -> Key:
        return Key(ours, why=why, is_on=is_on, is_refused=True)

    def at_stage_3(ours: str, convert: Callable[[Any], Any]) -> Key:
        return Key(ours, convert, f"DeepSpeed ignores it at stage {stage}", lambda _: stage == 3)

    offload = dict.fromkeys(
        (
            *("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline", "pipeline_read"),
            *("pipeline_write", "fast_init", "cpuadam_cores_perc"),
        ),
        Key(why="the engine decides it"),
    )
    own = {key: Key(why=why) for key, why in OWNED.items()}
    own |= {key: lacks(OWNED[key]) for key in _OPTIONAL}
    own["zenflow"] = lacks(OWNED["zenflow"], lambda value: value is not None)  # an empty section switches it on
    own["mics_shard_size"] = lacks(OWNED["mics_shard_size"], lambda value: _integer(value) > 0)
    device = {
        "optimizer": Key("zero.offload.optimizer", lambda value: value or "none"),
        "param": at_stage_3("zero.offload.param", lambda value: value or "none"),
    }
    nvme = Key("zero.offload.nvme_path", str, "nothing is on NVMe", lambda _: uses_nvme)
    persistence = at_stage_3("zero.param_persistence_elements", _integer)
    further = (
        *("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"),
        *("model_persistence_threshold", "param_persistence_threshold"),
    )
    stage_key = Key(
        "zero.stage",
        lambda value: _integer(value) or 1,
        note="" if stage else "1 trains the same weights as 0, with less memory",
    )
    zero_keys = own | {
        "stage": stage_key,
        "overlap_comm": Key("zero.overlap_comm"),
        "reduce_bucket_size": Key(
            "zero.reduce_bucket_bytes",
            lambda value: max(1024, _integer(value) * element_bytes),
            note="bytes, not elements",
        ),
        "allgather_bucket_size": Key(why="it is as large as zero.reduce_bucket_bytes"),
        "sub_group_size": at_stage_3("zero.deepspeed.sub_group_size", _integer),
        HPZ: Key(f"zero.deepspeed.{HPZ}", _integer, "it is off", lambda value: stage == 3 and _integer(value) > 1),
        "enable_sanity_checks": Key("zero.deepspeed.enable_sanity_checks"),
        **{f"stage3_{key}": at_stage_3(f"zero.deepspeed.stage3_{key}", _integer) for key in further},
        **{key: at_stage_3(f"zero.deepspeed.stage3_{key}", _integer) for key in further},
        "param_persistence_threshold": persistence,
        "stage3_param_persistence_threshold": persistence,
        "cpu_offload": switch("zero.offload.optimizer", "cpu", "nothing is offloaded"),
        **dict.fromkeys(
            ("cpu_offload_param", "cpu_offload_params"),
            replace(device["param"], convert=lambda value: "cpu" if value else "none"),
        ),
        **{f"offload_{part}.device": key for part, key in device.items()},
        **dict.fromkeys(("offload_optimizer.nvme_path", "offload_param.nvme_path"), nvme),
        **section("offload_optimizer", offload),
        **section("offload_param", offload),
        "offload_optimizer.ratio": lacks("all states are offloaded or none", lambda value: _number(value) != 1),
        "offload_optimizer.super_offload": lacks("set zero.offload.optimizer=cpu alone"),
    }
    decays = lacks("AdamW decouples weight decay", lambda value: not value, "optim.weight_decay")
    warm_up = lacks("warm-up is linear, from lr / warmup_steps", lambda value: _number(value) > 0, "optim.warmup_steps")
    precision = {
        f"{name}.enabled": switch(
            "dtype",
            "float32" if is_full_precision else low,
            "another key gives the dtype",
            lambda value: bool(value) or is_full_precision,
        )
        for name, low in (("fp16", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16"))
    }
    return {
        **{key: lacks(f"not supported{why}") for why, keys in _REFUSED.items() for key in keys.split()},
        **{key: Key(why=why) for why, keys in _NO_EFFECT.items() for key in keys.split()},
        **section(zero, zero_keys),
        zero: Key("zero.stage", _stage_of_switch, note="DeepSpeed's old switch: stage 1 or none"),
        "zero_stage": stage_key,
        **{f"offload_{part}_device": key for part, key in device.items()},
        **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"), nvme),
        **precision,
        "fp16.loss_scale": lacks("the loss scale is dynamic; use 0", lambda value: _number(value) != 0),
        "mixed_precision": Key("dtype", lambda value: _DTYPES.get(value, value)),
        "gradient_clipping": Key(
            "optim.grad_clip",
            lambda value: _number(value) or None,
            note="of gradients; DeepSpeed clips Muon's steps" if optimizer == "muon" else "",
        ),
        "gradient_predivide_factor": lacks("gradients are averaged by tokens", lambda value: _number(value) != 1),
        "communication_data_type": switch(
            "zero.fp32_reduce", True, "gradients are reduced in the model's dtype", lambda value: value == "fp32"
        ),
        "data_types.grad_accum_dtype": Key("zero.fp32_grad_accum", lambda value: value == "fp32" or dtype == "float32"),
        "fsdp_config": lacks("DeepSpeed shards", ours="zero.stage"),
        "parallelism_config": lacks("ranks are divided by one setting", ours="sequence_parallel"),
        "sequence_parallel_size": Key("sequence_parallel", _integer),
        "debug": switch("collective_guard", "auto", "off is the default"),
        "dynamo_config": switch(
            "compile", True, "not compiled", lambda value: value.get("dynamo_backend", "NO") != "NO"
        ),
        "compile.disable": Key("compile", lambda value: not value),
        "compile.backend": lacks("the backend is inductor", lambda value: value != "inductor"),
        "compile.deepcompile": lacks("DeepCompile is not supported", ours="compile"),
        "optimizer": lacks(f"known here: {', '.join(_OPTIMIZERS)}, and classes of torch.optim", ours="optim.name"),
        "optimizer.type": Key("optim.name", _optimizer),
        **section(
            "optimizer.params",
            {
                "betas": Key("optim.betas", lambda value: [_number(one) for one in value]),
                **{key: Key(f"optim.{key}", _number) for key in ("lr", "eps", "weight_decay")},
                "adam_w_mode": decays,
                "bias_correction": lacks("AdamW always corrects it", lambda value: not value),
                **_params(optimizer, optimizer_params),
            },
        ),
        "scheduler": lacks(f"known here: {', '.join(_SCHEDULES)}", ours="optim.schedule"),
        "scheduler.type": Key(
            "optim.schedule", _SCHEDULES.get, note="warm-up is linear; DeepSpeed's is logarithmic by default"
        ),
        **section(
            "scheduler.params",
            {
                "warmup_max_lr": Key("optim.lr", _number),
                "warmup_num_steps": Key("optim.warmup_steps", _integer),
                "total_num_steps": Key("optim.total_steps", _integer),
                "cos_min_ratio": Key("optim.min_lr_ratio", _number),
                "warmup_min_lr": warm_up,
                "warmup_min_ratio": warm_up,
                "warmup_type": lacks("warm-up is linear", lambda value: value != "linear", "optim.warmup_steps"),
            },
        ),
    }


def _optimizer(name: str) -> str:
    if name.lower() in _OPTIMIZERS:
        # Adam of DeepSpeed is AdamW unless adam_w_mode is false.
        return "adamw" if name.lower() == "adam" else name.lower()
    return f"torch.optim:{name}"


def _stage_of_switch(value: Any) -> int:
    if not isinstance(value, bool):
        raise TypeError("a section is needed")
    return 1


def _left_out(given: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Keys of the optimizer and scheduler that a file leaves out, with DeepSpeed's defaults where ours are others."""
    optimizer, scheduler = given.get("optimizer.type"), given.get("scheduler.type")
    is_muon = optimizer is not None and _optimizer(str(optimizer)) == "muon"
    params: dict[str, Any] = {"adjust_lr_fn": "original", "betas": [0.9, 0.95], "eps": 1e-10} if is_muon else {}
    if is_muon and "optimizer.params.lr" not in given:
        params |= {"muon_lr": 0.02, "adam_lr": 3e-4}
    elif optimizer is not None and "scheduler.params.warmup_max_lr" not in given:
        params |= {"lr": 1e-3}
    schedule: dict[str, Any] = {"warmup_num_steps": 1000} if str(scheduler) in _SCHEDULES else {}
    further = {"WarmupDecayLR": {"warmup_max_lr": 1e-3}, "WarmupCosineLR": {"cos_min_ratio": 1e-4}}
    schedule |= further.get(str(scheduler), {})
    return [
        (f"{section}.type (its {key})", f"{section}.params.{key}", value)
        for section, values in (("optimizer", params), ("scheduler", schedule))
        for key, value in values.items()
        if f"{section}.params.{key}" not in given
    ]


def _params(optimizer: str, given: Collection[str]) -> dict[str, Key]:
    """Rows of `optimizer.params` that another optimizer than AdamW adds or replaces."""
    if optimizer == "muon":
        # lr is of both parts; muon_lr and adam_lr override it for theirs.
        rest = Key("optim.options.adam_lr", _number)
        if "muon_lr" in given:
            both = Key(why="muon_lr and adam_lr override it")
            rows = {"lr": both if "adam_lr" in given else rest, "muon_lr": Key("optim.lr", _number)}
        else:
            rows = {}
        same = "the step is the same"
        return rows | {
            "adam_lr": rest,
            "momentum": Key("optim.options.momentum", _number),
            "adjust_lr_fn": Key("optim.options.adjust_lr_fn", note="DeepSpeed scales a step by its shape alone"),
            "ns_method": Key(why=same),
            "per_head_muon": Key("optim.name", why="matrices are stepped whole", is_on=bool, is_refused=True),
        }
    if optimizer in ("adamw", "adam8bit"):
        return {}
    return {key: Key(f"optim.options.{key}") for key in given if key not in ("lr", "weight_decay")}


def imported(
    source: Path | str | Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    further: Mapping[str, Key] | None = None,
) -> list[Entry]:
    """The fate of every key of a config.

    Args:
        source: the file, or its contents.
        given: dotted settings of ours that override the file.
        further: rows that replace those of the table, for settings that are not the engine's.

    Raises:
        EngineConfigError: the file cannot be read, is not of DeepSpeed or accelerate, or has a value of the wrong type;
            two keys disagree about a setting.
    """
    given = given or {}
    tree, folder = (source, Path()) if isinstance(source, Mapping) else (_read(Path(source)), Path(source).parent)
    backend = tree.get("distributed_type", "DEEPSPEED")
    if backend != "DEEPSPEED":
        raise EngineConfigError(field="distributed_type", value=backend, allowed="DEEPSPEED")
    keys = list(_flattened(tree, folder))
    keys += _left_out({path: value for _, path, value in keys})
    values = {path: value for _, path, value in keys}
    rows = table(**_context(values, given)) | dict(further or {})
    if not any(path in rows for path in values):
        raise EngineConfigError("no key of DeepSpeed or accelerate", field="deepspeed", value=str(source))
    entries = [_entry(name, path, value, rows, given) for name, path, value in keys]
    mapped: dict[str, Entry] = {}
    for entry in (entry for entry in entries if entry.fate == "mapped"):
        before = mapped.setdefault(entry.ours, entry)
        if before.our_value != entry.our_value:
            problem = f"{before.theirs} is {before.value}, and both set {entry.ours}"
            raise EngineConfigError(problem, field=entry.theirs, value=entry.value, remedy="remove one of them")
    return entries


def config_from_deepspeed(
    source: Path | str | Mapping[str, Any], *, given: Mapping[str, Any] | None = None
) -> EngineConfig:
    """The engine's configuration for a config of DeepSpeed or accelerate.

    Args:
        source: the file, or its contents.
        given: dotted settings, such as `{"optim.lr": 1e-6}`, that override the file.

    Raises:
        EngineConfigError: as `imported`; a key is refused; a setting is invalid.
    """
    given = given or {}
    entries = imported(source, given=given)
    refused = [entry for entry in entries if entry.fate == "refused"]
    for first in refused[:1]:
        others = ", ".join(entry.theirs for entry in refused[1:])
        remedy = "; ".join(filter(None, (first.ours and f"set {first.ours}", others and f"also refused: {others}")))
        raise EngineConfigError(first.why, field=first.theirs, value=first.value, remedy=remedy or None)
    settings = {entry.ours: entry.our_value for entry in entries if entry.fate == "mapped"}
    return engine_config({**settings, **given})


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration with dotted settings, all at once: some are valid only together.

    Raises:
        EngineConfigError: an unknown key, or an invalid value.
    """
    keys = list(_paths(EngineConfig))
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in keys and not key.startswith(("optim.options.", "zero.deepspeed.")):
            inner = key.partition(".")[2]  # such as zero.stage for actor.zero.stage of an app
            near = [inner] if inner in keys else difflib.get_close_matches(key, keys, n=1)
            hint: dict[str, str] = {"remedy": f"nearest: {near[0]}"} if near else {"allowed": ", ".join(keys)}
            raise EngineConfigError("unknown key", field=key, **hint)
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = tuple(value) if isinstance(value, list) else value
    try:
        return TypeAdapter(EngineConfig).validate_python(values)
    except ValidationError as error:
        detail = error.errors()[0]
        section_path = ".".join(str(part) for part in detail["loc"])
        refused = detail.get("ctx", {}).get("error")
        if isinstance(refused, EngineConfigError):
            raise refused.under(section_path) from None
        raise EngineConfigError(detail["msg"], field=section_path, value=detail["input"]) from None


def _paths(config_class: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys."""
    for name, annotation in get_type_hints(config_class).items():
        section = next(filter(is_dataclass, (annotation, *get_args(annotation))), None)
        yield from [prefix + name] if section is None else _paths(section, f"{prefix}{name}.")


def _context(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what other keys mean."""
    stage = given.get("zero.stage", values.get("zero_optimization.stage", values.get("zero_stage", 2)))
    is_fp16 = values.get("fp16.enabled") is True
    dtype = given.get("dtype") or _DTYPES.get(values.get("mixed_precision"), "float16" if is_fp16 else "bfloat16")
    reduces_fp32 = values.get("communication_data_type") == "fp32"
    number = _converted("zero_optimization.stage", 2 if stage == "auto" else stage, _integer)
    switches = [value for key, value in values.items() if key in ("fp16.enabled", "bf16.enabled", "bfloat16.enabled")]
    is_full_precision = "mixed_precision" not in values and bool(switches) and not any(switches)
    if is_full_precision:
        dtype = given.get("dtype") or "float32"
    devices = [value for key, value in {**values, **given}.items() if key.startswith(_OFFLOAD_DEVICES)]
    return {
        "stage": number,
        "dtype": dtype,
        "reduce_dtype": "float32" if reduces_fp32 else dtype,
        "uses_nvme": "nvme" in devices,
        "is_full_precision": is_full_precision,
        "optimizer": _optimizer(str(values.get("optimizer.type", "adamw"))),
        "optimizer_params": [key[17:] for key in values if key.startswith("optimizer.params.")],
    }


def _flattened(
    tree: Mapping[str, Any], folder: Path, prefix: str = "", path: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """The keys of a file, and of the file that it names: name with the file's, dotted key of the table, value."""
    for key, value in tree.items():
        own = f"{path}{key}"
        if own in _SECTIONS and isinstance(value, Mapping) and _has_known_type(own, value):
            below = "" if own == "deepspeed_config" else f"{own}."
            yield from _flattened(value, folder, f"{prefix}{key}.", below)
            continue
        yield prefix + key, own, value
        if key == "deepspeed_config_file" and value is not None:
            file = Path(value) if Path(value).is_file() else folder / value
            yield from _flattened(_read(file), folder, f"{file.name}:")


def _has_known_type(section: str, value: Mapping[str, Any]) -> bool:
    """False for an optimizer or scheduler that is refused as a whole."""
    if section == "optimizer":
        return str(value.get("type", "adamw")).lower() not in _DEEPSPEEDS_OWN
    return section != "scheduler" or str(value.get("type")) in _SCHEDULES


def _entry(name: str, path: str, value: Any, rows: Mapping[str, Key], given: Collection[str]) -> Entry:
    """The fate of a key. accelerate's users give keys of `zero_optimization` in `deepspeed_config`."""
    key = rows.get(path) or (rows.get(f"zero_optimization.{path}") if "deepspeed_config." in name else None)
    if key is None:
        return Entry(theirs=name, value=value, fate="refused", why=_unknown(path, rows))

    def entry(fate: Fate, why: str, our_value: Any = None) -> Entry:
        ours = "" if fate == "no effect" else key.ours
        return Entry(theirs=name, value=value, fate=fate, ours=ours, our_value=our_value, why=why)

    if value == "auto" or (value is None and key.ours and not key.is_refused):
        return entry("open", "yours, or the default") if key.ours else entry("no effect", key.why)
    if not _converted(name, value, key.is_on) or not (key.ours or key.is_refused):
        return entry("no effect", "it is off" if key.is_refused else key.why)
    if key.ours in given:
        return entry("overridden", "given beside the file")
    if key.is_refused:
        return entry("refused", key.why)
    return entry("mapped", key.note, _converted(name, value, key.convert))


def _converted(name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError, AttributeError) as error:
        raise EngineConfigError(f"it has another type: {error}", field=name, value=value) from None


def _unknown(path: str, known: Collection[str]) -> str:
    """Message about an unknown key. A known key in another section is nearer than one of a similar name."""
    if path in _SECTIONS:
        return "a section is needed"
    last = path.rpartition(".")[2]
    near = [key for key in known if key.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(path, (*known, *_SECTIONS), n=1)
    return f"unknown; nearest: {near[0]}" if near else "unknown"


def _read(file: Path) -> dict[str, Any]:
    """A file of accelerate (YAML) or DeepSpeed (JSON)."""
    try:
        return dict((json.loads if file.suffix == ".json" else yaml.safe_load)(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise EngineConfigError(f"it cannot be read: {error}", field="deepspeed", value=str(file)) from None
