"""Open settings of a supervised run: learning rates, recomputation, micro batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_engine import ModelShape, estimate_memory
from ds_engine.config import MOST_PATH_ROWS
from rl_core.batching.layout import DEFAULT_TOKEN_BUDGET

from ..config import DEFAULT_NUM_RANKS
from ..launch.gpus import Gpu
from ..launch.session import read_devices
from ..ranks.environment import prepare_driver
from ..supervised_job_config import SupervisedJobConfigT
from ..training.engines import naming_engine
from .engines import resolve_compile, resolve_kernels, resolve_learning_rate
from .memory import (
    TOKEN_BUDGETS,
    USABLE,
    Recompute,
    check_states_fit,
    gib,
    keeps_probabilities,
    read_model_shape,
    reserved_bytes,
    resolve_sizes,
    size_plans,
    state_bytes,
)
from .resolved import ResolvedConfig, device_warning, with_fetched_files


def resolve_supervised(config: SupervisedJobConfigT) -> ResolvedConfig[SupervisedJobConfigT]:
    """Fills in the settings of a supervised run that are null.

    Raises InputError and PlacementError as `resolve_job`.
    """
    config = with_fetched_files(config)
    prepare_driver(config.trainer.device)
    gpus = read_devices(config.trainer).gpus
    resolved = resolve_supervised_for(config, gpus=gpus, shape=read_model_shape(config.model.path) if gpus else None)
    resolved = resolved.with_default("data.instruction", "", "no reward reads responses", listed=False)
    return replace(resolved, warning=device_warning(config.trainer))


def resolve_supervised_for(
    config: SupervisedJobConfigT, *, gpus: Sequence[Gpu], shape: ModelShape | None
) -> ResolvedConfig[SupervisedJobConfigT]:
    """The rule of `resolve_supervised`, as a pure function; arguments and errors as in `resolve_job_for`."""
    resolved = ResolvedConfig.on_devices(config, gpus).on_trainer_device(on_gpu=bool(gpus))
    sp = config.engine.sequence_parallel
    ranks = max(sp, len(gpus) // sp * sp) if gpus else max(sp, DEFAULT_NUM_RANKS)
    why = f"engine.sequence_parallel is {sp}" if ranks == sp > 2 else "one per GPU" if gpus else "two on the CPU"
    resolved = resolved.with_default("trainer.num_ranks", ranks, why)
    resolved = resolve_learning_rate(resolved, "supervised", config.model, config.engine, config.learning_rates)
    if config.first_stage.trains:
        rates = config.first_stage.learning_rates
        resolved = resolve_learning_rate(resolved, "warm_start", config.model, config.engine, rates)
    resolved = resolve_kernels(resolved, ("engine",), gpus)
    resolved = resolve_compile(resolved, "engine", config.engine, shape, on_gpu=bool(gpus))
    if shape is not None:
        return _resolve_memory(resolved, shape, min(gpu.free_bytes for gpu in gpus))
    return resolve_sizes(resolved, Recompute(), token_budget=DEFAULT_TOKEN_BUDGET, why="the default")


def _resolve_memory(
    resolved: ResolvedConfig[SupervisedJobConfigT], shape: ModelShape, free: int
) -> ResolvedConfig[SupervisedJobConfigT]:
    """Recomputation and micro batches: the largest micro batches that fit, without recomputation if possible."""
    config, usable = resolved.config, int(free * USABLE)
    budgets = (config.batch.max_packed_tokens,) if config.token_budget or config.micro_batch_size else TOKEN_BUDGETS
    if config.micro_batch_size and config.supervised.max_length:
        budgets = (config.micro_batch_size * config.supervised.max_length,)
    plans = size_plans([config.engine], budgets, budgets[-1], shape)
    sp, engine = config.engine.sequence_parallel, replace(config.engine, optim=config.supervised.optim)
    dp = max(1, config.trainer.rank_count // sp)
    with naming_engine("engine"):
        keeping = [(replace(one, logits=False), budget) for one, budget in plans] * keeps_probabilities(config)
        estimates = {
            (recompute, budget): estimate_memory(
                shape,
                recompute.fill(engine),
                dp=dp,
                tokens_per_micro_batch=budget * sp,
                path_rows_per_token=MOST_PATH_ROWS * config.share_prefixes,
            )
            for recompute, budget in [*plans, *keeping]
        }
    peaks = {plan: reserved_bytes(state_bytes(one), one.activations.device) for plan, one in estimates.items()}
    check_states_fit(state_bytes(estimates[plans[-1]]), usable, free, shape, "engine")
    best = next((plan for plan in plans if peaks[plan] <= usable), None)
    why = "fits into memory" if best else "the smallest that is tried"
    recompute, budget = best = best or plans[-1]
    if (kept := (replace(recompute, logits=False), budget)) in peaks and peaks[kept] <= usable:
        recompute, budget = best = kept  # in memory that nothing else needs
    line = f"memory of a GPU: {gib(peaks[best])} for a rank at its peak, of {gib(free)} free"
    if peaks[best] > usable:
        line += "; expect it to run out of memory: use engine.zero.stage=3, zero.offload, LoRA or more GPUs"
    resolved = resolve_sizes(resolved, recompute, token_budget=budget, why=why)
    return replace(resolved, memory=line, rank_bytes=peaks[best])
