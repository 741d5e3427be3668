"""Memory of a GPU divided between a rank and a server: turns, recomputation, micro batches and the KV cache.

The plan counts the trainer (`ds_engine.estimate_memory`) and the server on the same GPU
(`rollout_vllm.estimate_server_memory`): activations are recomputed, micro batches shrink, MLPs run in tiles where one
sequence keeps micro batches large, and the KV cache gives way, in this order, until both fit. If they never do, they
take turns: servers sleep while the trainer works, and if that is not enough, optimizer states wait in host memory while
the servers generate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ds_engine import EngineConfig, MemoryEstimate, ModelShape, estimate_memory
from ds_engine.config import MOST_PATH_ROWS
from ds_engine.nf4_size import nf4_bytes
from plinth_base.model_folder import find_model_folder
from rl_core.batching.layout import DEFAULT_TOKEN_BUDGET
from rollout_vllm import RolloutConfig, ServerMemory, estimate_server_memory
from rollout_vllm.servers.memory import kv_value_bytes

from ..config import BUILTIN_MODEL, FrozenModel
from ..errors import InputError
from ..job_config import JobConfig, JobConfigT
from ..rollout.memory_turns import sleep_level
from ..supervised_job_config import SupervisedJobConfig
from ..training.engines import naming_engine
from .resolved import ResolvedConfig

BudgetT = TypeVar("BudgetT", int, int | None)
TrainingConfigT = TypeVar("TrainingConfigT", bound=JobConfig | SupervisedJobConfig)
Turns = Literal["never", "servers", "both"]
"""Values of `trainer.take_turns`, in the order in which they are tried."""

TOKEN_BUDGETS = (DEFAULT_TOKEN_BUDGET, 8_192, 4_096)
TILE_TOKENS = 4_096
"""Tokens of a tile of MLPs: enough for fast matrix products, and their activations take less than a layer's other ones
of a long sequence."""
_KV_SHARES = ((1.0, 0.75, 0.5, 0.4, 0.3), (0.2, 0.1))
"""Sizes of the KV cache, relative to all sequences of a step at full length; the second group is a last resort. Few
responses are that long, and recomputed layers in small micro batches cost more than a cache that fills now and then."""
_KV_BLOCK = 16
"""Tokens of a block of vLLM's KV cache. A sequence takes whole blocks, and vLLM keeps one block empty."""
_FRAGMENTATION = 1.12
"""Reserved over allocated bytes of what torch's allocator gets and returns in every step; states are allocated once."""
_TRAINER_BYTES = 2 * 2**30
"""CUDA context, communicators and the buckets of the weight sync of a rank."""
USABLE = 0.97
"""Share of a GPU's free memory that is planned."""
_MOVED_PER_S = 27e9
"""Bytes that a rank moves between GPU and pinned host memory in a second, as measured for each of two ranks on a host;
a single rank moved 38e9 (benchmarks/memory_turns)."""
_ALONE = 0.9
"""Share of a GPU that a server without a rank beside it uses."""


def read_model_shape(path: str, *, key: str = "model.path") -> ModelShape | None:
    """Sizes of a model folder; None for the built-in model. Raises InputError, which names `key`."""
    if path == BUILTIN_MODEL:
        return None
    try:
        return ModelShape.read(find_model_folder(path))
    except ValueError as error:
        raise InputError(str(error), field=key, value=path) from error


def samples_per_server(config: JobConfig) -> int:
    """Samples of a step that a server generates at most."""
    prompts = config.batch.train_batch_size + config.oversampling.extra_prompts
    return -(-prompts * config.sampling.num_samples // config.rollout.server_count)


def longest_sequence(config: JobConfig) -> int:
    """Tokens of the longest prompt and response."""
    return config.data.max_prompt_length + max(config.sampling.response_tokens, config.validation.response_tokens)


@dataclass(frozen=True)
class Recompute:
    """Values of the engine's open settings that trade computation for memory."""

    layers: bool = False
    tile: int = 0
    logits: bool = True

    def fill(self, engine: EngineConfig) -> EngineConfig:
        """The settings with these values where they are open."""
        if engine.gradient_checkpointing is None:
            engine = replace(engine, gradient_checkpointing=self.layers)
        if engine.keep_probabilities is None:
            engine = replace(engine, keep_probabilities=not self.logits)
        return engine if engine.tiled_mlp is not None else replace(engine, tiled_mlp=self.tile)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Planned bytes of the largest rank, per turn."""

    peak: int
    """At the peak of a training step."""
    states: int
    """Weights, gradients and optimizer states alone."""
    beside: int
    """While the servers generate, if everything stays on the GPU."""
    kept: int
    """While the servers generate, if the states are moved."""
    offloaded: int
    """States that are offloaded while the servers generate."""
    offloads_gradients: bool
    """`offloaded` includes gradients."""
    offloaded_on_host: int
    """Offloaded states of all ranks, which are on one host."""
    saved_on_host: int
    """Copies of all ranks for a checkpoint in the background."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to divide a GPU between a rank and a server."""

    turns: Turns
    recompute: Recompute
    token_budget: int | None
    kv_share: float
    rank: _Rank
    server: ServerMemory | None
    level_1: bool
    """Sleeping servers keep their weights in host memory."""
    servers_on_host: int

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the rank and the server in the turn with the most."""
        if self.server is None:
            return self.rank.peak
        if self.turns == "never":
            return self.rank.peak + self.server.total
        generating = self.rank.kept if self.turns == "both" else self.rank.beside
        return max(self.rank.peak + self.server.asleep, generating + self.server.total)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that turns need, with the copies for checkpoints."""
        if self.turns == "never" or self.server is None:
            return 0
        weights = self.server.weights * self.servers_on_host if self.level_1 else 0
        offloaded = self.rank.offloaded_on_host if self.turns == "both" else 0
        return offloaded + weights + self.rank.saved_on_host

    @property
    def moved_bytes(self) -> int:
        """Bytes that one GPU and the host exchange in a step, in both directions."""
        if self.server is None or self.turns == "never":
            return 0
        return 2 * ((self.rank.offloaded if self.turns == "both" else 0) + (self.server.weights if self.level_1 else 0))


def resolve_memory(
    resolved: ResolvedConfig[JobConfigT],
    free: int,
    total: int,
    shape: ModelShape,
    frozen_shapes: Mapping[str, ModelShape | None],
    host: float,
) -> ResolvedConfig[JobConfigT]:
    """Turns, recomputation, micro batches and the server's share."""
    usable = int(free * USABLE)
    plans = list(_plans(resolved.config, shape, frozen_shapes, total))
    in_host = [plan for plan in plans if plan.host_bytes <= host]
    plan = next((p for p in in_host if p.gpu_bytes <= usable), None)
    if plan is None:
        _refuse_what_cannot_fit(plans, usable, free, host, shape)
    fits = plan is not None
    plan = plan or min(in_host, key=lambda p: p.gpu_bytes)
    if fits and keeps_probabilities(resolved.config):  # in memory that nothing else needs
        recompute = replace(plan.recompute, logits=False)
        rank = _rank_memory(resolved.config, shape, frozen_shapes, recompute, plan.token_budget)
        keeping = replace(plan, recompute=recompute, rank=rank)
        plan = keeping if keeping.gpu_bytes <= usable else plan
    why = "fits into memory" if fits else "the smallest that is tried"
    why_turns = f"rank and server {'fit' if plan.turns == 'never' else 'do not fit'} side by side"
    if plan.server is None:
        why_turns = "no server shares a GPU with a rank"
    resolved = resolved.with_default("trainer.take_turns", plan.turns, why_turns)
    resolved = resolve_sizes(resolved, plan.recompute, token_budget=plan.token_budget, why=why)
    if plan.server is not None:
        resolved = _resolve_share(resolved, plan, total)
    elif not resolved.config.rollout.urls:
        resolved = resolved.with_default("rollout.gpu_memory_utilization", _ALONE, "the server has its GPU alone")
    is_estimate = "" if shape.is_exact else " (upper bounds: the planner knows only the sizes of its parameters)"
    line = _memory_line(plan, free) + is_estimate
    if not fits:
        line += "; expect it to run out of memory: use actor.zero.stage=3, zero.offload, LoRA or more GPUs"
    return replace(resolved, memory=line, rank_bytes=plan.rank.peak, plan=plan)


def _refuse_what_cannot_fit(plans: Sequence[Plan], usable: int, free: int, host: float, shape: ModelShape) -> None:
    """Raises InputError if no way can work; a plan that only its estimated activations make too large may be tried."""
    states = plans[-1].rank.states
    check_states_fit(states, usable, free, shape, "actor")
    fits_gpu = [plan for plan in plans if plan.gpu_bytes <= usable]
    if (fits_gpu and shape.is_exact) or not any(plan.host_bytes <= host for plan in plans):
        needed = min(plan.host_bytes for plan in fits_gpu or plans)
        raise InputError(
            f"ranks and servers fit on {gib(free)} of GPU memory only in turns, which need {gib(needed)} of host "
            f"memory, and {gib(host)} can be used",
            field="model.path",
            remedy="train adapters (actor.lora.rank=16), or use more GPUs with actor.zero.stage=3",
        )


def check_states_fit(states: int, usable: int, free: int, shape: ModelShape, section: str) -> None:
    if states > usable and shape.is_exact:
        raise InputError(
            f"weights, gradients and optimizer states of a rank take {gib(states)}, and a GPU has {gib(free)} free",
            field="model.path",
            remedy=f"use more GPUs with {section}.zero.stage=3, {section}.zero.offload.optimizer=cpu, or "
            f"{section}.lora.rank=16",
        )


def _memory_line(plan: Plan, free: int) -> str:
    """The memory plan for the user."""
    rank, server = plan.rank, plan.server
    if server is None:
        return f"memory of a GPU: {gib(rank.peak)} for a rank at its peak, of {gib(free)} free"
    of_server = f"(weights {server.weights / 2**30:.1f}, KV cache {server.kv_cache / 2**30:.1f})"
    if plan.turns == "never":
        return (
            f"memory of a GPU: {gib(rank.peak)} for a rank at its peak, {gib(server.total)} for the server "
            f"{of_server}, of {gib(free)} free"
        )
    line = (
        f"memory of a GPU in turns: {gib(rank.peak)} for a rank at its peak and {gib(server.asleep)} for a sleeping "
        f"server; {gib(server.total)} for the server {of_server} and "
        f"{gib(rank.kept if plan.turns == 'both' else rank.beside)} for a waiting rank, of {gib(free)} free"
    )
    if not plan.moved_bytes:
        return f"{line}; nothing is moved, servers discard their weights"
    waiting = [
        *(["optimizer states" + " and gradients" * rank.offloads_gradients] if plan.turns == "both" else []),
        *(["the servers' weights"] if plan.level_1 else []),
    ]
    seconds = plan.moved_bytes / _MOVED_PER_S
    return (
        f"{line}; {' and '.join(waiting)} wait in host memory ({gib(plan.host_bytes)}): {seconds:.0f} s a step, "
        f"estimated at {_MOVED_PER_S / 1e9:.0f} GB/s"
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _resolve_share(resolved: ResolvedConfig[JobConfigT], plan: Plan, total: int) -> ResolvedConfig[JobConfigT]:
    """The server's KV cache, and the share of the GPU that vLLM wants to find free at its start."""
    assert plan.server is not None
    rollout = resolved.config.rollout
    if rollout.gpu_memory_utilization is None:
        gib = math.ceil(plan.server.kv_cache / 2**30 * 100) / 100
        why = f"{plan.kv_share:.0%} of all sequences at full length"
        resolved = resolved.with_default("rollout.kv_cache_gib", gib, why)
    share = min(0.99, math.ceil(plan.server.total / total * 100) / 100)
    return resolved.with_default("rollout.gpu_memory_utilization", share, "what the server needs")


def resolve_sizes(
    resolved: ResolvedConfig[TrainingConfigT], recompute: Recompute, *, token_budget: int | None, why: str
) -> ResolvedConfig[TrainingConfigT]:
    """Recomputation of every trained model, and the size of micro batches."""
    config = resolved.config
    for model in config.models:
        resolved = resolved.with_default(f"{model.section}.gradient_checkpointing", recompute.layers, why)
        resolved = resolved.with_default(f"{model.section}.tiled_mlp", recompute.tile, why, listed=recompute.tile > 0)
        keeps = not recompute.logits and model.head == "lm"
        resolved = resolved.with_default(f"{model.section}.keep_probabilities", keeps, why, listed=keeps)
    if config.batch.micro_batch_size is not None:
        return resolved
    key = "batch.token_budget" if isinstance(config, JobConfig) else "token_budget"
    return resolved.with_default(key, token_budget, why)


def _plans(
    config: JobConfig, shape: ModelShape, frozen_shapes: Mapping[str, ModelShape | None], total: int
) -> Iterator[Plan]:
    """All ways in the order of preference; at least one."""
    budgets: Sequence[int | None] = TOKEN_BUDGETS
    if config.actor.match_servers:  # its layers are not compiled, so that each launch takes longer
        budgets = (2 * DEFAULT_TOKEN_BUDGET, *TOKEN_BUDGETS)
    if config.batch.micro_batch_size is not None or config.batch.token_budget is not None:
        budgets = (config.batch.token_budget,)
    least = max(budgets[-1] or 0, longest_sequence(config) * (config.batch.micro_batch_size or 1))
    sizes = size_plans([model.engine for model in config.models], budgets, least, shape)
    tried: tuple[Turns, ...] = ("never",)
    if config.trainer.take_turns is not None:
        tried = (config.trainer.take_turns,)
    elif _shares_gpus(config) and not config.trainer.max_staleness:
        tried = ("never", "servers", "both")
    for turns in tried:
        for shares in _KV_SHARES:
            for recompute, budget in sizes:
                rank = _rank_memory(config, shape, frozen_shapes, recompute, budget)
                for share in shares:
                    yield Plan(
                        turns=turns,
                        recompute=recompute,
                        token_budget=budget,
                        kv_share=share,
                        rank=rank,
                        server=_server_memory(config, shape, share, total),
                        level_1=sleep_level(config.rollout) == 1,
                        servers_on_host=config.rollout.server_count * config.rollout.tensor_parallel_size,
                    )


def size_plans(
    engines: Sequence[EngineConfig], budgets: Sequence[BudgetT], least: int, shape: ModelShape
) -> list[tuple[Recompute, BudgetT]]:
    """Pairs of recomputation and the size of micro batches, in the order of preference.

    Args:
        least: tokens of the smallest micro batch. MLPs run in tiles if it is larger than usual, because micro batches
            cannot shrink then, and the family is known.
    """
    is_open: bool = any(engine.gradient_checkpointing is None for engine in engines)
    ways = [Recompute(), *([Recompute(layers=True)] if is_open else [])]
    # Small micro batches without recomputation are no better than larger ones with it.
    sizes = [size for size in itertools.product(ways, budgets) if not is_open or size != (ways[0], TOKEN_BUDGETS[-1])]
    can_tile = all(engine.trains_without_noise and engine.zero.offload.param != "nvme" for engine in engines)
    if least > DEFAULT_TOKEN_BUDGET and shape.is_exact and can_tile:
        sizes += [(Recompute(layers=True, tile=TILE_TOKENS), budget) for budget in budgets]
    return sizes


def keeps_probabilities(config: JobConfig | SupervisedJobConfig) -> bool:
    """True if a trained model can keep the probabilities of its LM head."""
    return any(model.head == "lm" and model.engine.model_dtype == "bfloat16" for model in config.models)


def _shares_gpus(config: JobConfig) -> bool:
    """True if servers are on the ranks' GPUs."""
    return not config.rollout.urls and config.trainer.colocate


def _rank_memory(
    config: JobConfig,
    shape: ModelShape,
    frozen_shapes: Mapping[str, ModelShape | None],
    recompute: Recompute,
    budget: int | None,
) -> _Rank:
    """The rank with the most, and what the ranks move in turns."""
    tokens = budget or config.batch.max_packed_tokens
    if config.batch.micro_batch_size is not None:
        tokens = config.batch.micro_batch_size * longest_sequence(config)
    shared: list[MemoryEstimate] = []
    alone: list[MemoryEstimate] = []
    for model in config.models:
        engine = recompute.fill(model.engine)
        ranks = model.own_ranks or config.trainer.rank_count
        with naming_engine(model.section):
            estimate = estimate_memory(
                shape,
                engine,
                dp=max(1, ranks // engine.sequence_parallel),
                tokens_per_micro_batch=max(tokens, longest_sequence(config)) * engine.sequence_parallel,
                path_rows_per_token=MOST_PATH_ROWS * (config.batch.share_prefixes and model.head == "lm"),
                head=model.head,
            )
        (alone if model.own_ranks else shared).append(estimate)
    frozen = shared[0].weights.device if config.keeps_reference else 0
    for frozen_model in config.frozen_models:
        if (its_shape := frozen_shapes.get(frozen_model.key)) is not None:
            frozen += _frozen_bytes(config, frozen_model, its_shape, tokens)
    groups = [shared, *([estimate] for estimate in alone)]
    states = [sum(map(state_bytes, group)) for group in groups]
    beside = [n + frozen * (group is shared) for n, group in zip(states, groups, strict=True)]
    # The weights of the actor stay for the push; the other states that exist between steps move.
    kept = [sum(e.buffers.device for e in group) + (group is shared) * shared[0].weights.device for group in groups]
    freed = [sum(e.gradients.device - e.lasting_gradients for e in group) for group in groups]
    offloaded = [n - k - f for n, k, f in zip(beside, kept, freed, strict=True)]
    return _Rank(
        peak=max(reserved_bytes(n, max(e.activations.device for e in g)) for n, g in zip(beside, groups, strict=True)),
        states=max(states),
        beside=max(beside) + _TRAINER_BYTES,
        kept=max(kept) + _TRAINER_BYTES,
        offloaded=max(offloaded),
        offloads_gradients=any(e.lasting_gradients for group in groups for e in group),
        offloaded_on_host=sum(n * group[0].num_ranks for n, group in zip(offloaded, groups, strict=True)),
        saved_on_host=sum(e.num_ranks * (e.weights.device + e.optimizer.device) for group in groups for e in group)
        if config.trainer.save_freq
        else 0,
    )


def _frozen_bytes(config: JobConfig, model: FrozenModel, shape: ModelShape, tokens: int) -> int:
    """Device bytes of a frozen model on a rank while the actor is updated, which takes more than its own forward pass.

    These are its weights; with its distributions also the hidden states of a micro batch of `tokens` tokens and, at
    stage 3, a copy of the whole LM head.
    """
    engine = config.frozen_engine
    dp = max(1, config.trainer.rank_count // engine.sequence_parallel)
    with naming_engine("actor", key=model.key, path=model.path):
        weights = estimate_memory(shape, engine, dp=dp, tokens_per_micro_batch=1, head=model.head).weights.device
    if not model.keeps_distributions:
        return weights
    size = 4 if engine.model_dtype == "float32" else 2
    return weights + size * shape.hidden * (tokens + (shape.vocab if engine.zero.stage == 3 else 0))


def state_bytes(estimate: MemoryEstimate) -> int:
    """Device bytes of weights, gradients, optimizer and buffers."""
    return estimate.device_bytes - estimate.activations.device


def reserved_bytes(states: int, activations: int) -> int:
    """Device bytes of a rank whose step needs `activations` beside `states`."""
    return states + int(activations * _FRAGMENTATION) + _TRAINER_BYTES


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // _KV_BLOCK) * _KV_BLOCK


def _server_memory(config: JobConfig, shape: ModelShape, kv_share: float, total: int) -> ServerMemory | None:
    """The server on a rank's GPU; None if there is none."""
    rollout = config.rollout
    if not _shares_gpus(config):
        return None
    size = 4 if rollout.dtype == "float32" else 2
    per_token = 2 * shape.num_layers * shape.kv_width * kv_value_bytes(rollout)
    assert rollout.max_num_seqs is not None, "decided before"
    assert rollout.max_model_len is not None, "decided before"
    sequences, longest = rollout.max_num_seqs, rollout.max_model_len
    at_once = min(sequences, samples_per_server(config))
    whole = at_once * _whole_blocks(min(longest, longest_sequence(config)))
    needed = _KV_BLOCK + max(_whole_blocks(longest), int(whole * kv_share))
    if rollout.kv_cache_gib is not None:
        needed = int(rollout.kv_cache_gib * rollout.tensor_parallel_size * 2**30 / per_token)
    memory = estimate_server_memory(
        weight_bytes=_server_weights(rollout, shape, size),
        kv_bytes_per_token=per_token,
        kv_tokens=needed,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        max_num_seqs=sequences,
        tensor_parallel_size=rollout.tensor_parallel_size,
        element_bytes=size,
        graphs=not rollout.enforce_eager,
    )
    if rollout.gpu_memory_utilization is not None and rollout.kv_cache_gib is None:
        # vLLM fills its share with the KV cache.
        rest = int(rollout.gpu_memory_utilization * total) - memory.total + memory.kv_cache
        return replace(memory, kv_cache=max(0, rest))
    return memory


def _server_weights(rollout: RolloutConfig, shape: ModelShape, size: int) -> int:
    """Bytes of a server's weights with `size` bytes per element. In NF4, one dequantized matrix comes on top."""
    vision = () if shape.vision is None else shape.vision.weights
    total = sum(weight.size for weight in (*shape.weights(), *vision))
    if rollout.quantization == "none":
        return size * total
    matrices = [weight.size for weight in shape.linear_layers()]
    rounded = shape.num_layers * sum(matrices)
    return size * (total - rounded + max(matrices)) + shape.num_layers * sum(map(nf4_bytes, matrices))
