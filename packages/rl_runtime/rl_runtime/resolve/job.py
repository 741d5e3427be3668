"""Open settings of a reinforcement-learning run, decided for the devices on which it starts.

`resolve_job` reads the GPUs; `resolve_job_for` is the pure rule. A setting that is given is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ds_engine import ModelShape
from rl_core import BatchError, batch_layout
from rl_core.batching.layout import DEFAULT_TOKEN_BUDGET
from rl_data import check_files
from rollout_vllm import untested_vllm
from rollout_vllm.servers.command import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_MAX_NUM_SEQS,
    MAX_GRAPH_SIZE,
    server_threads,
)
from rollout_vllm.servers.memory import DEFAULT_CPU_KV_CACHE_GIB
from weight_sync import choose_transports, plan_transports
from weight_sync.transports.select import transport_kind

from ..config import DEFAULT_NUM_RANKS
from ..errors import naming_key
from ..job_config import JobConfig, JobConfigT
from ..launch.gpus import Gpu
from ..launch.session import read_devices
from ..ranks.environment import prepare_driver
from ..rules import value_of
from ..training.teacher_config import TeacherConfig
from .engines import resolve_compile, resolve_kernels, resolve_learning_rate, with_rate
from .instruction import resolve_instruction
from .memory import Recompute, longest_sequence, read_model_shape, resolve_memory, resolve_sizes, samples_per_server
from .own_model import ModelFacts, choose_defaults, read_facts
from .resolved import ResolvedConfig, device_warning, with_fetched_files

_HOST_USABLE = 0.9
"""Share of the host's free memory that is planned."""
_NO_SHAPES: Mapping[str, ModelShape | None] = {}


def resolve_job(config: JobConfigT) -> ResolvedConfig[JobConfigT]:
    """Fills in the settings that are null, for the GPUs of this host or of the cluster, or the CPU.

    Raises:
        InputError: the model's folder cannot be read, or its training states alone exceed a GPU; or there is no cluster
            at `trainer.ray_address`.
        PlacementError: CUDA_VISIBLE_DEVICES names no usable GPU.
    """
    config = with_fetched_files(config)
    prepare_driver(config.trainer.device)
    devices = read_devices(config.trainer)
    gpus = devices.gpus
    frozen = config.frozen_models if gpus else ()
    resolved = resolve_job_for(
        config,
        gpus=gpus,
        shape=read_model_shape(config.model.path) if gpus else None,
        host_bytes=devices.host_bytes,
        host_cores=devices.host_cores,
        frozen_shapes={model.key: read_model_shape(model.path, key=model.key) for model in frozen},
        untested=untested_vllm(),
        facts=read_facts(config.model.path),
    )
    return replace(resolve_steps(resolve_instruction(resolved)), warning=device_warning(config.trainer))


def resolve_job_for(
    config: JobConfigT,
    *,
    gpus: Sequence[Gpu],
    shape: ModelShape | None,
    host_bytes: int | None = None,
    host_cores: Sequence[int] = (2,),
    frozen_shapes: Mapping[str, ModelShape | None] = _NO_SHAPES,
    untested: str | None = None,
    facts: ModelFacts | None = None,
) -> ResolvedConfig[JobConfigT]:
    """The rule of `resolve_job`, as a pure function.

    Args:
        gpus: the GPUs that the run may use; none: the CPU.
        shape: sizes of the model; None: it is so small that its memory does not matter.
        host_bytes: free memory of this host, or of all hosts; None: unknown, and not limited.
        host_cores: CPU cores of each host.
        frozen_shapes: sizes of `config.frozen_models` by their keys; None: as for `shape`.
        facts: those from which the defaults of a user's model follow; None: the built-in model.
        untested: why the installed vLLM is none of the tested versions; None: it is one.

    Raises:
        InputError: the training states alone exceed a GPU, or what turns move exceeds the host's memory.
    """
    resolved = ResolvedConfig.on_devices(config, gpus).on_trainer_device(on_gpu=bool(gpus))
    resolved = _resolve_for_model(resolved, facts, on_gpu=bool(gpus))
    resolved = _resolve_processes(resolved, len(gpus))
    resolved = _resolve_correction(resolved)
    mode = config.actor.router_replay
    resolved = resolved.with_default("rollout.routes", mode == "R3", f"actor.router_replay is {mode}", listed=False)
    if mode != "off":
        resolved = resolved.with_default("actor.tiled_mlp", 0, f"actor.router_replay is {mode}", listed=False)
        resolved = resolved.with_default("actor.compile", False, "compiled layers cannot replay routes", listed=False)
    resolved = _resolve_running_requests(resolved, untested)
    resolved = resolve_kernels(resolved, [model.section for model in config.models], gpus)
    for model in config.models:
        resolved = resolve_compile(resolved, model.section, model.engine, shape, on_gpu=bool(gpus))
    resolved = _resolve_decoding(resolved, bool(gpus), shape)
    if config.warm_start.steps:
        rates = config.warm_start.learning_rates
        resolved = resolve_learning_rate(resolved, "warm_start", config.model, config.actor, rates)
    if gpus and shape is not None:
        free, total = min(gpu.free_bytes for gpu in gpus), min(gpu.total_bytes for gpu in gpus)
        host = math.inf if host_bytes is None else host_bytes * _HOST_USABLE
        resolved = resolve_memory(resolved, free, total, shape, frozen_shapes, host)
    else:
        why = "the default"
        resolved = resolved.with_default("trainer.take_turns", "never", why)
        resolved = resolve_sizes(resolved, Recompute(), token_budget=DEFAULT_TOKEN_BUDGET, why=why)
    resolved = _resolve_sync(_resolve_length_shaping(resolved), on_gpu=bool(gpus))
    resolved = _resolve_server_modes(resolved)
    for section in _server_sections(resolved.config):
        resolved = _resolve_server_defaults(resolved, section, host_cores, on_gpu=bool(gpus))
    return resolved


def resolve_steps(resolved: ResolvedConfig[JobConfigT]) -> ResolvedConfig[JobConfigT]:
    """`trainer.total_training_steps=null` decided: as many steps as see every row once.

    Raises InputError for files that cannot be read.
    """
    config = resolved.config
    if config.trainer.total_training_steps is not None:
        return resolved
    rows, size = config.task.num_train, config.batch.train_batch_size
    if config.data.train:
        with naming_key("data.train"):
            rows = check_files(config.data.train, config.data, rewards=())
    why = f"one epoch, {rows} prompts in steps of {size}"
    return resolved.with_default("trainer.total_training_steps", -(-rows // size), why)


def resolve_traces(resolved: ResolvedConfig[JobConfigT], run: Path) -> ResolvedConfig[JobConfigT]:
    """The folder of the servers' traces in the run folder `run`, for steps that are traced on this host."""
    trainer, rollout = resolved.config.trainer, resolved.config.rollout
    if not trainer.profile_steps or trainer.ray_address is not None or rollout.urls or rollout.profile_dir is not None:
        return resolved
    folder = str(run / "profile" / "servers")
    return resolved.with_consequence("rollout.profile_dir", folder, "trainer.profile_steps")


def _resolve_for_model(
    resolved: ResolvedConfig[JobConfigT], facts: ModelFacts | None, *, on_gpu: bool
) -> ResolvedConfig[JobConfigT]:
    """Learning rates, samples, response length and KL."""
    config = resolved.config
    chosen = choose_defaults(
        facts,
        lora={model.section: model.engine.lora is not None for model in config.models},
        prompt_tokens=config.data.max_prompt_length,
        learned_reward=config.reward.model is not None or config.reward.service != "http",
        on_gpu=on_gpu,
    )
    for key, (value, why) in chosen.items():
        section, _, rest = key.partition(".")
        if hasattr(config, section) and rest == "optim.lr":
            resolved = with_rate(resolved, section, value, why, listed=facts is not None)
        elif hasattr(config, section):
            resolved = resolved.with_default(key, value, why, listed=facts is not None)
    resolved = resolved.with_default("validation.n", 1, "the default", listed=False)
    tokens = resolved.config.sampling.response_tokens
    return resolved.with_default("validation.max_tokens", tokens, "as sampling.max_tokens", listed=False)


# ------------------------------------------------------------------ processes


def _resolve_processes(resolved: ResolvedConfig[JobConfigT], num_gpus: int) -> ResolvedConfig[JobConfigT]:
    """Ranks and servers."""
    trainer, rollout = resolved.config.trainer, resolved.config.rollout
    own = sum(model.own_ranks for model in resolved.config.models)
    per_server = rollout.tensor_parallel_size
    apart = 0
    if not rollout.urls and not trainer.colocate and num_gpus:
        apart = per_server * (rollout.num_servers or max(1, (num_gpus - own) // (2 * per_server)))
    limit = max(1, num_gpus - own - apart) if num_gpus else DEFAULT_NUM_RANKS
    ranks = next((n for n in range(limit, 0, -1) if divides(resolved.config, n)), limit)
    why = (
        ("one per GPU" if num_gpus else "two on the CPU") if ranks == limit else f"the batch does not divide by {limit}"
    )
    resolved = resolved.with_default("trainer.num_ranks", ranks, why)
    if rollout.urls:
        return resolved
    ranks = resolved.config.trainer.rank_count
    if not num_gpus:
        return resolved.with_default("rollout.num_servers", 1, "one on the CPU")
    shared = ranks + own if trainer.colocate else num_gpus - ranks - own
    why = "one per GPU" if per_server == 1 else f"one per {per_server} GPUs"
    return resolved.with_default("rollout.num_servers", max(1, shared // per_server), why)


def divides(config: JobConfig, num_ranks: int) -> bool:
    """True if mini batches divide over this number of ranks for every model on them."""
    for model in config.models:
        sp, ranks = model.engine.sequence_parallel, model.own_ranks or num_ranks
        if ranks % sp:
            return False
        try:
            batch_layout(config.batch, samples_per_prompt=config.sampling.num_samples, dp=ranks // sp, sp=sp)
        except BatchError:
            return False
    return True


# ------------------------------------------------------------------ staleness


def _resolve_correction(resolved: ResolvedConfig[JobConfigT]) -> ResolvedConfig[JobConfigT]:
    """Importance weights for samples of older policy versions."""
    staleness = resolved.config.trainer.max_staleness
    if not staleness or not hasattr(resolved.config, "algorithm"):
        return resolved
    why = f"samples are up to {staleness} policy versions old"
    remedy = "algorithm.rollout_correction.mode=none trains without it"
    return resolved.with_default("algorithm.rollout_correction.mode", "truncate", why, remedy=remedy)


def _resolve_running_requests(resolved: ResolvedConfig[JobConfigT], untested: str | None) -> ResolvedConfig[JobConfigT]:
    """The treatment of responses in flight when weights are pushed while servers generate."""
    if not resolved.config.trainer.max_staleness:
        return resolved
    treatment, why = "keep", "a push does not interrupt responses"
    if resolved.config.rollout.urls:
        treatment, why = "wait", "existing servers do not label tokens with policy versions"
    elif not resolved.config.rollout.fast_paths:
        treatment, why = "wait", "with rollout.fast_paths=false servers do not label tokens with policy versions"
    elif untested is not None:
        treatment, why = "wait", f"servers may not label tokens with policy versions: {untested}"
    elif resolved.config.actor.match_servers:
        treatment, why = "recompute", "with actor.match_servers no token has a cache of older weights"
    return resolved.with_default("sync.running_requests", treatment, why)


def _resolve_length_shaping(resolved: ResolvedConfig[JobConfigT]) -> ResolvedConfig[JobConfigT]:
    """DAPO's buffer before the longest response."""
    algorithm, max_tokens = getattr(resolved.config, "algorithm", None), resolved.config.sampling.response_tokens
    if algorithm is None or not algorithm.overlong_penalty:
        return resolved
    why = "a fifth of sampling.max_tokens"
    return resolved.with_default("algorithm.overlong_buffer", max(1, max_tokens // 5), why, listed=False)


# -------------------------------------------------------------------- servers


def _resolve_server_modes(resolved: ResolvedConfig[JobConfigT]) -> ResolvedConfig[JobConfigT]:
    """Modes of the servers that other settings need."""
    trainer, oversampling = resolved.config.trainer, resolved.config.oversampling
    if resolved.config.actor.match_servers:
        why = "actor.match_servers"
        resolved = resolved.with_consequence("rollout.match_trainer", True, why)
        resolved = resolved.with_consequence("rollout.dtype", resolved.config.actor.model_dtype, why)
    if trainer.takes_turns:
        resolved = resolved.with_consequence("rollout.sleep_mode", True, "trainer.take_turns")
    if trainer.max_staleness:
        resolved = resolved.with_consequence("rollout.control_routes", True, "trainer.max_staleness")
    elif oversampling.extra_prompts and oversampling.partial_rollouts:
        resolved = resolved.with_consequence("rollout.control_routes", True, "oversampling.partial_rollouts")
    teacher = _served_teacher(resolved.config)
    if teacher is None:
        return resolved
    why = "the longest prompt and response, and one token more"
    longest = resolved.config.data.max_prompt_length + resolved.config.sampling.response_tokens + 1
    resolved = resolved.with_default("teacher.server.max_model_len", longest, why, listed=False)
    return resolved.with_consequence("teacher.server.log_probs", False, "a teacher samples nothing")


def _served_teacher(config: JobConfig) -> TeacherConfig | None:
    """The teacher of a distillation on servers."""
    teacher: TeacherConfig | None = getattr(config, "teacher", None)
    return teacher if teacher is not None and teacher.on == "server" else None


def _server_sections(config: JobConfig) -> tuple[str, ...]:
    """The configuration sections of the servers that the run starts."""
    teacher = _served_teacher(config)
    started = {"rollout": not config.rollout.urls, "teacher.server": teacher is not None and not teacher.server.urls}
    return tuple(section for section, is_started in started.items() if is_started)


def _resolve_server_defaults(
    resolved: ResolvedConfig[JobConfigT], section: str, host_cores: Sequence[int], *, on_gpu: bool
) -> ResolvedConfig[JobConfigT]:
    """Device and threads of servers, and the defaults of vLLM's settings on this device."""
    device: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
    num_servers = value_of(resolved.config, section).server_count
    on_host = num_servers if section != "rollout" else -(-num_servers // len(host_cores))
    defaults = {
        "device": (device, "trainer.device"),
        "num_servers": (num_servers, "the default"),
        "cpu_threads": (server_threads(device, min(host_cores), on_host, None), "the cores of a host"),
        "max_num_seqs": (DEFAULT_MAX_NUM_SEQS, "the default"),
        "enforce_eager": (not on_gpu, "the default"),
        "chunked_prefill": (on_gpu, "the default"),
    }
    if on_gpu:
        defaults["gpu_memory_utilization"] = (DEFAULT_GPU_MEMORY_UTILIZATION, "the default")
    else:
        defaults["kv_cache_gib"] = (DEFAULT_CPU_KV_CACHE_GIB, "the default")
    for name, (value, why) in defaults.items():
        resolved = resolved.with_default(f"{section}.{name}", value, why, listed=False)
    return resolved


def _resolve_sync(resolved: ResolvedConfig[JobConfigT], *, on_gpu: bool) -> ResolvedConfig[JobConfigT]:
    """The transport of weights, unless it depends on the host that each server gets; the size of its buckets."""
    config = resolved.config
    names: set[str] = {config.sync.transport}
    if config.sync.transport == "auto" and config.rollout.urls:
        names = set(choose_transports(config.sync, config.rollout.urls, on_gpu=on_gpu).values())
    elif config.sync.transport == "auto":
        is_here = {"a server here": True} | ({} if config.trainer.ray_address is None else {"one elsewhere": False})
        names = set(plan_transports("auto", is_here, on_gpu=on_gpu).values())
    if len(names) == 1:
        resolved = resolved.with_default("sync.transport", min(names), "the place of the servers", listed=False)
    smallest = min(transport_kind(name).bucket_mib for name in names)
    return resolved.with_default("sync.bucket_mib", smallest, "the transport's default", listed=False)


def _resolve_decoding(
    resolved: ResolvedConfig[JobConfigT], on_gpu: bool, shape: ModelShape | None
) -> ResolvedConfig[JobConfigT]:
    """CUDA graphs, and sequences at once."""
    if resolved.config.rollout.urls:
        return resolved
    graphs = on_gpu and shape is not None
    why = "CUDA graphs decode faster" if graphs else "CUDA graphs need a GPU, and pay off from some 100M parameters"
    resolved = resolved.with_default("rollout.enforce_eager", not graphs, why)
    if on_gpu:
        samples = samples_per_server(resolved.config)
        most = min(MAX_GRAPH_SIZE, samples)
        why = "all samples of a step at once" if most == samples else "as many as CUDA graphs are captured for"
        resolved = resolved.with_default("rollout.max_num_seqs", most, why)
        longest = longest_sequence(resolved.config)
        resolved = resolved.with_default("rollout.max_model_len", longest, "the longest prompt and response")
    return resolved
