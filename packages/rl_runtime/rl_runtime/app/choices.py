"""Settings that a configuration leaves open (null or `auto`), chosen for the devices on which the run starts.

`choose_settings` reads the GPUs; `choose_for` is the pure rule. A setting that is given is never changed.
`memory_choices` divides the memory of the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ds_engine import EngineConfig, ModelShape
from ds_engine.planning.model_shape import FAMILIES, read_shape
from plinth_base.model_folder import find_model_folder
from rl_core import BatchError, batch_layout
from rl_core.batching.layout import DEFAULT_TOKEN_BUDGET
from rollout_vllm import untested_vllm

from ..config import BUILTIN_MODEL, DEFAULT_NUM_RANKS, ModelConfig, RanksConfig, value_of
from ..errors import InputError
from ..launch.gpus import Gpu
from ..launch.session import read_memory
from ..ranks.environment import prepare_driver, why_cpu
from ..training.supervised_config import LearningRates
from .choice import Choice, ConfigT, with_value
from .job_config import JobConfig, JobConfigT
from .memory_choices import (
    choose_budget,
    choose_memory,
    choose_sizes,
    choose_supervised_memory,
    longest_sequence,
    samples_per_server,
)
from .supervised_job_config import SupervisedJobConfigT

_MOST_SEQUENCES = 512
"""Sequences for which vLLM captures CUDA graphs."""
_HOST_USABLE = 0.9
"""Share of the host's free memory that is planned."""
_AMPERE = (8, 0)
"""Compute capability of the first GPUs with bfloat16 and FlashAttention."""
_NO_SHAPES: Mapping[str, ModelShape | None] = {}


def choose_settings(config: JobConfigT) -> Choice[JobConfigT]:
    """Fills in the settings that are null, for the GPUs of this host or of the cluster, or the CPU.

    Raises:
        InputError: the model's folder cannot be read, or its training states alone exceed a GPU; or there is no cluster
            at `trainer.ray_address`.
        PlacementError: CUDA_VISIBLE_DEVICES names no usable GPU.
    """
    prepare_driver(config.trainer.device)
    gpus, host_bytes = read_memory(config.trainer)
    shape = _read_shape(config.model.path) if gpus else None
    frozen = {model.key: _read_shape(model.path, key=model.key) for model in config.frozen_models if gpus}
    untested = untested_vllm()
    choice = choose_for(config, gpus=gpus, shape=shape, host_bytes=host_bytes, frozen_shapes=frozen, untested=untested)
    return replace(choice, warning=_device_warning(config.trainer))


def choose_supervised(config: SupervisedJobConfigT) -> Choice[SupervisedJobConfigT]:
    """Fills in the settings of a supervised run that are null.

    Raises InputError and PlacementError as `choose_settings`.
    """
    prepare_driver(config.trainer.device)
    gpus, _ = read_memory(config.trainer)
    choice = choose_supervised_for(config, gpus=gpus, shape=_read_shape(config.model.path) if gpus else None)
    return replace(choice, warning=_device_warning(config.trainer))


def _device_warning(trainer: RanksConfig) -> str:
    """`why_cpu` on this host; the nodes of a cluster have variables of their own."""
    return why_cpu(trainer.device) if trainer.ray_address is None else ""


def choose_supervised_for(
    config: SupervisedJobConfigT, *, gpus: Sequence[Gpu], shape: ModelShape | None
) -> Choice[SupervisedJobConfigT]:
    """The rule of `choose_supervised`, as a pure function; arguments and errors as in `choose_for`."""
    choice = Choice(config=config, devices=_devices(gpus))
    sp = config.engine.sequence_parallel
    ranks = max(sp, len(gpus) // sp * sp) if gpus else max(sp, DEFAULT_NUM_RANKS)
    why = f"engine.sequence_parallel is {sp}" if ranks == sp > 2 else "one per GPU" if gpus else "two on the CPU"
    choice = choice.with_default("trainer.num_ranks", ranks, why)
    choice = _choose_learning_rate(choice, "supervised", config.model, config.engine, config.learning_rates)
    if config.first_stage.trains:
        rates = config.first_stage.learning_rates
        choice = _choose_learning_rate(choice, "warm_start", config.model, config.engine, rates)
    choice = _choose_kernels(choice, ("engine",), gpus)
    works, why = _compiles(config.engine, shape) if gpus else (False, "off on the CPU")
    choice = choice.with_default("engine.compile", works, why)
    if shape is not None:
        return choose_supervised_memory(choice, shape, min(gpu.free_bytes for gpu in gpus))
    choice = choice.with_default("engine.gradient_checkpointing", False, "the default")
    return choose_budget(choice, DEFAULT_TOKEN_BUDGET, "the default")


def _choose_learning_rate(
    choice: Choice[ConfigT], section: str, model: ModelConfig, engine: EngineConfig, rates: LearningRates
) -> Choice[ConfigT]:
    """`SupervisedConfig.optim` and `PreferenceTrainingConfig.optim` have the sources."""
    rate, why = rates.full, "all weights of a trained model"
    if model.path == BUILTIN_MODEL:
        rate, why = rates.builtin, "the built-in model starts from random weights"
    elif engine.lora is not None:
        rate, why = rates.lora, "LoRA adapters"
    return choice.with_default(f"{section}.optim.lr", rate, why)


def choose_for(
    config: JobConfigT,
    *,
    gpus: Sequence[Gpu],
    shape: ModelShape | None,
    host_bytes: int | None = None,
    frozen_shapes: Mapping[str, ModelShape | None] = _NO_SHAPES,
    untested: str | None = None,
) -> Choice[JobConfigT]:
    """The rule of `choose_settings`, as a pure function.

    Args:
        gpus: the GPUs that the run may use; none: the CPU.
        shape: sizes of the model; None: it is so small that its memory does not matter.
        host_bytes: free memory of this host, or of all hosts; None: unknown, and not limited.
        frozen_shapes: sizes of `config.frozen_models` by their keys; None: as for `shape`.
        untested: why the installed vLLM is none of the tested versions; None: it is one.

    Raises:
        InputError: the training states alone exceed a GPU, or what turns move exceeds the host's memory.
    """
    choice = Choice(config=config, devices=_devices(gpus))
    choice = _choose_processes(choice, len(gpus))
    choice = _choose_correction(choice)
    choice = _choose_held_requests(choice, untested)
    choice = _choose_kernels(choice, [model.section for model in config.models], gpus)
    choice = _choose_speed(choice, bool(gpus), shape)
    if config.warm_start.steps:
        rates = config.warm_start.learning_rates
        choice = _choose_learning_rate(choice, "warm_start", config.model, config.actor, rates)
    if gpus and shape is not None:
        free, total = min(gpu.free_bytes for gpu in gpus), min(gpu.total_bytes for gpu in gpus)
        host = math.inf if host_bytes is None else host_bytes * _HOST_USABLE
        return choose_memory(choice, free, total, shape, frozen_shapes, host)
    choice = choice.with_default("trainer.take_turns", "never", "the default")
    return choose_sizes(choice, gradient_checkpointing=False, token_budget=DEFAULT_TOKEN_BUDGET, why="the default")


def _read_shape(path: str, *, key: str = "model.path") -> ModelShape | None:
    if path == BUILTIN_MODEL:
        return None
    try:
        return read_shape(find_model_folder(path))
    except ValueError as error:
        raise InputError(f"{key} is {path}: {error}") from error


def _devices(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "the CPU"
    least = min(gpu.free_bytes for gpu in gpus)
    return f"{len(gpus)} x {gpus[0].name} ({least / 2**30:.0f} GiB free)"


# ------------------------------------------------------------------ processes


def _choose_processes(choice: Choice[JobConfigT], num_gpus: int) -> Choice[JobConfigT]:
    """Ranks and servers."""
    trainer, rollout = choice.config.trainer, choice.config.rollout
    own = sum(model.own_ranks for model in choice.config.models)
    per_server = rollout.tensor_parallel_size
    apart = 0
    if not rollout.urls and not trainer.colocate and num_gpus:
        apart = per_server * (rollout.num_servers or max(1, (num_gpus - own) // (2 * per_server)))
    limit = max(1, num_gpus - own - apart) if num_gpus else DEFAULT_NUM_RANKS
    ranks = next((n for n in range(limit, 0, -1) if divides(choice.config, n)), limit)
    why = (
        ("one per GPU" if num_gpus else "two on the CPU") if ranks == limit else f"the batch does not divide by {limit}"
    )
    choice = choice.with_default("trainer.num_ranks", ranks, why)
    if rollout.urls:
        return choice
    ranks = choice.config.trainer.rank_count
    if not num_gpus:
        return choice.with_default("rollout.num_servers", 1, "one on the CPU")
    shared = ranks + own if trainer.colocate else num_gpus - ranks - own
    why = "one per GPU" if per_server == 1 else f"one per {per_server} GPUs"
    return choice.with_default("rollout.num_servers", max(1, shared // per_server), why)


def _choose_correction(choice: Choice[JobConfigT]) -> Choice[JobConfigT]:
    """Importance weights for samples of older policy versions."""
    staleness = choice.config.trainer.max_staleness
    if not staleness or not hasattr(choice.config, "algorithm"):
        return choice
    why = f"samples are up to {staleness} policy versions old"
    try:
        return choice.with_default("algorithm.rollout_correction.mode", "truncate", why)
    except InputError as error:
        raise InputError(f"{error}; algorithm.rollout_correction.mode=none trains without it") from error


def _choose_held_requests(choice: Choice[JobConfigT], untested: str | None) -> Choice[JobConfigT]:
    """What happens to the responses in flight when weights are pushed while servers generate."""
    if not choice.config.trainer.max_staleness:
        return choice
    found, why = "keep", "a push does not interrupt responses"
    if choice.config.rollout.urls:
        found, why = "wait", "existing servers do not label tokens with policy versions"
    elif untested is not None:
        found, why = "wait", f"servers may not label tokens with policy versions: {untested}"
    return choice.with_default("sync.running_requests", found, why)


def divides(config: JobConfig, num_ranks: int) -> bool:
    """Whether mini batches divide over this number of ranks for every model on them."""
    for model in config.models:
        sp, ranks = model.engine.sequence_parallel, model.own_ranks or num_ranks
        if ranks % sp:
            return False
        try:
            batch_layout(config.batch, samples_per_prompt=config.sampling.n, dp=ranks // sp, sp=sp)
        except BatchError:
            return False
    return True


# ---------------------------------------------------------------------- speed


def _choose_kernels(choice: Choice[ConfigT], sections: Iterable[str], gpus: Sequence[Gpu]) -> Choice[ConfigT]:
    """float16 and SDPA on GPUs without bfloat16 and FlashAttention (before Ampere, such as Turing)."""
    oldest = min((gpu.capability for gpu in gpus if gpu.capability is not None), default=_AMPERE)
    if oldest >= _AMPERE:
        return choice
    of_gpu = f"on GPUs of compute capability {oldest[0]}.{oldest[1]}"
    for section in sections:
        choice = choice.with_default(f"{section}.dtype", "float16", f"no bfloat16 {of_gpu}")
        if value_of(choice.config, key := f"{section}.attention") == "auto":
            reasons = {**choice.reasons, key: f"no FlashAttention {of_gpu}"}
            choice = replace(choice, config=with_value(choice.config, key, "sdpa"), reasons=reasons)
        if value_of(choice.config, f"{section}.dtype") == "bfloat16":
            raise InputError(f"{section}.dtype is bfloat16; allowed: float16 or float32 {of_gpu}, or null")
    return choice


def _choose_speed(choice: Choice[JobConfigT], on_gpu: bool, shape: ModelShape | None) -> Choice[JobConfigT]:
    """Compiled layers, CUDA graphs, and sequences at once."""
    config = choice.config
    for model in config.models:
        works, why = _compiles(model.engine, shape) if on_gpu else (False, "off on the CPU")
        choice = choice.with_default(f"{model.section}.compile", works, why)
    if not config.rollout.urls:
        graphs = on_gpu and shape is not None
        why = "CUDA graphs decode faster" if graphs else "CUDA graphs need a GPU, and pay off from some 100M parameters"
        choice = choice.with_default("rollout.enforce_eager", not graphs, why)
        if on_gpu:
            samples = samples_per_server(choice.config)
            most = min(_MOST_SEQUENCES, samples)
            why = "all samples of a step at once" if most == samples else "as many as CUDA graphs are captured for"
            choice = choice.with_default("rollout.max_num_seqs", most, why)
            longest = longest_sequence(config)
            choice = choice.with_default("rollout.max_model_len", longest, "the longest prompt and response")
    return choice


def _compiles(engine: EngineConfig, shape: ModelShape | None) -> tuple[bool, str]:
    if shape is None:
        return False, "compiling takes longer than training the built-in model"
    if not shape.is_exact:
        return False, f"only {', '.join(FAMILIES)} are compiled without being asked"
    if engine.lora is not None and engine.lora.base_format == "nf4":
        return False, "an NF4 base is dequantized outside of compiled layers"
    if engine.zero.offload.param == "nvme":
        return False, "weights on NVMe are fetched in hooks inside the layers"
    return True, "compiled layers train faster"
