"""Seconds and bytes of each phase of a step, from a configuration without open settings. Pure functions.

The phases follow each other, as in the training loop: every GPU is in one phase at a time. Within a phase, computation
and gathers overlap, so the slower one counts; all-to-alls of sequence parallelism and the collectives after the last
backward pass do not overlap with anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from apps.forecast.config import ForecastConfig, RatesConfig
from apps.forecast.links import Links, ring_links
from apps.forecast.work import decode_bytes, prompt_reads
from ds_engine import MemoryEstimate, ModelShape
from ds_engine.planning.operations import forward_operations
from ds_engine.planning.traffic import Traffic, exchanged_bytes, forward_traffic, update_traffic
from rl_core import BatchLayout
from rl_runtime import Placement
from rollout_vllm.servers.checks import kv_value_bytes
from weight_sync.transports.routes import plan_transports

_FORWARD_SHARE = 1 / 3
"""A pass without gradients is one of the three parts of a training step."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of a step."""

    name: str
    seconds: float
    limit: str
    """What takes the time."""
    waiting: str
    """Who waits meanwhile."""
    links: Links = field(default_factory=Links)
    """Bytes that each GPU sends; in a push, rank 0's."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the phases are calculated from."""

    config: ForecastConfig
    """Without open settings."""
    shape: ModelShape
    frozen_shapes: Mapping[str, ModelShape]
    """Sizes of `config.frozen_models` by their keys."""
    placement: Placement
    layout: BatchLayout
    memory: MemoryEstimate
    """Of a rank."""
    moved_bytes: int = 0
    """Bytes that one GPU and its host exchange for turns in a step."""

    @property
    def rates(self) -> RatesConfig:
        """Measured rates."""
        return self.config.rates

    @property
    def num_ranks(self) -> int:
        """All ranks of the actor."""
        return len(self.placement.ranks)

    @property
    def ranks_per_host(self) -> int:
        """Ranks on the first host."""
        return sum(slot.node == self.placement.ranks[0].node for slot in self.placement.ranks)

    @property
    def num_samples(self) -> int:
        """Responses of a step."""
        return self.layout.num_prompts * self.layout.samples_per_prompt

    @property
    def num_updates(self) -> int:
        """Optimizer steps of a step."""
        return self.layout.num_mini_batches * self.config.algorithm.num_epochs

    @property
    def tokens(self) -> int:
        """Mean tokens of a sequence."""
        return self.config.prompt_length + self.config.response_length

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model in the servers' dtype."""
        return self.element_bytes * self.memory.num_parameters

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight in the servers."""
        return 4 if self.config.rollout.dtype == "float32" else 2

    def micro_batches(self, sequences: int) -> int:
        """Micro batches of a replica that computes `sequences` sequences."""
        together = self.layout.sequences_per_forward or max(1, (self.layout.tokens_per_forward or 0) // self.tokens)
        return -(-sequences // together)

    def link_seconds(self, links: Links) -> float:
        """Seconds of a collective."""
        return links.seconds(
            nvlink_gb_per_s=self.rates.nvlink_gb_per_s, network_gb_per_s=self.config.cluster.network_gb_per_s
        )


def step_phases(job: Job) -> list[Phase]:
    """The phases of a step in their order, without scoring and without a checkpoint."""
    phases = [generation(job)]
    if left := job.layout.num_mini_batches - job.config.leaves_first_log_probs:
        phases.append(log_probs(job, "old log-probs", mini_batches=left))
    if job.config.keeps_reference:
        phases.append(log_probs(job, "ref log-probs"))
    for model in job.config.frozen_models:
        # The logits of a teacher with `teacher.signal=full`, which the updates compute, are not in the forecast.
        has_logits = model.head == "lm" and not model.keeps_distributions
        phases.append(log_probs(job, model.key, job.frozen_shapes[model.key], has_logits=has_logits))
    phases.append(updates(job))
    if job.moved_bytes:
        seconds = job.moved_bytes / job.rates.turns_gb_per_s / 1e9
        phases.append(Phase(name="turns", seconds=seconds, limit="host memory", waiting="all"))
    return [*phases, push(job)]


# ----------------------------------------------------------------- generation


def generation(job: Job) -> Phase:
    """Decoding, token by token, and the prompts before it, which the samples of a group share."""
    config, rates = job.config, job.rates
    rollout, tp = config.rollout, config.rollout.tensor_parallel_size
    samples = -(-job.num_samples // rollout.server_count)
    rounds = -(-samples // sequences_at_once(job))
    sequences = -(-samples // rounds)
    reads = 1.0
    if job.element_bytes == kv_value_bytes(rollout) == 2:  # others are left to vLLM's attention
        group = job.layout.samples_per_prompt
        reads = prompt_reads(job.shape, sequences=sequences, samples_per_prompt=group, tensor_parallel=tp)
    read = decode_bytes(
        weight_bytes=job.weight_bytes,
        kv_bytes_per_token=_kv_bytes_per_token(job),
        sequences=sequences,
        mean_context=reads * config.prompt_length + config.response_length / 2,
        tensor_parallel=tp,
    )
    # Two all-reduces a layer of one row per sequence.
    row_bytes = 2 * job.shape.num_layers * sequences * job.shape.hidden * job.element_bytes
    links = Links(nvlink=2 * row_bytes * (tp - 1) / tp)
    on_gpu = read / rates.decode_gb_per_s / 1e9 + job.link_seconds(links)
    on_host = (rates.decode_host_ms + rates.decode_host_ms_per_seq * sequences) / 1e3
    prompts = samples / job.layout.samples_per_prompt
    prefill = prompts * computing_s(rates, job.shape, prompt=config.prompt_length, response=0, layer_passes=1)
    steps = rounds * config.response_length
    return Phase(
        name="generation",
        seconds=steps * max(on_gpu, on_host) + prefill / tp,
        limit="weights and KV cache" if on_gpu >= on_host else "vLLM's Python",
        waiting="all ranks, for the slowest server",
        links=links.times(steps),
    )


def sequences_at_once(job: Job) -> int:
    """Sequences that a server decodes at the same time: as many as it may, and as fit into its KV cache."""
    rollout = job.config.rollout
    most = rollout.max_num_seqs or 256
    if rollout.kv_cache_gib is not None:
        cache = rollout.kv_cache_gib * rollout.tensor_parallel_size * 2**30
    else:  # vLLM fills its share of the GPUs
        share = (rollout.gpu_memory_utilization or 0.5) * job.config.cluster.gpu_gib * 2**30
        cache = share * rollout.tensor_parallel_size - job.weight_bytes
    return max(1, min(most, int(cache / _kv_bytes_per_token(job)) // job.tokens))


def _kv_bytes_per_token(job: Job) -> int:
    return 2 * job.shape.num_layers * job.shape.kv_width * kv_value_bytes(job.config.rollout)


# ------------------------------------------------------------------- training


def computing_s(
    rates: RatesConfig, shape: ModelShape, *, prompt: int, response: int, layer_passes: float, head_passes: int = 0
) -> float:
    """Seconds of a GPU for one sequence; a backward pass counts as two passes."""
    found = forward_operations(shape, prompt=prompt, response=response)
    products = (found.layers * layer_passes + found.head * head_passes) / rates.matmul_tflops
    attention = found.attention * layer_passes / rates.attention_tflops
    channels = (prompt + response) * shape.num_layers * shape.hidden * layer_passes
    return (products + attention + channels * rates.channel_ps) / 1e12


def log_probs(
    job: Job,
    name: str,
    shape: ModelShape | None = None,
    *,
    has_logits: bool = True,
    mini_batches: int | None = None,
) -> Phase:
    """A pass without gradients over the sequences of the step.

    Args:
        shape: of a frozen model; None: the actor's.
        mini_batches: number of mini batches to compute, in the micro batches of their updates; None: the whole step,
            packed together.
    """
    shape, layout, samples = shape or job.shape, job.layout, job.num_samples
    micro_batches = job.micro_batches(samples // layout.dp)
    if mini_batches is not None:
        samples = mini_batches * layout.train_batch_size
        micro_batches = mini_batches * job.micro_batches(layout.train_batch_size // layout.dp)
    links = _ring(job, forward_traffic(shape, job.config.actor, world_size=job.num_ranks)).times(micro_batches)
    return _passes(
        job,
        name,
        shape,
        passes=1,
        samples=samples,
        micro_batches=micro_batches,
        links=links,
        has_logits=has_logits,
    )


def updates(job: Job) -> Phase:
    """Forward and backward passes, and the optimizer steps, of all epochs."""
    actor, number = job.config.actor, job.num_updates
    micro_batches = job.micro_batches(job.layout.train_batch_size // job.layout.dp)
    overlapping, after = update_traffic(job.shape, actor, world_size=job.num_ranks, num_micro_batches=micro_batches)
    return _passes(
        job,
        "updates",
        job.shape,
        passes=4 if actor.gradient_checkpointing else 3,
        samples=job.num_samples * job.config.algorithm.num_epochs,
        micro_batches=micro_batches * number,
        links=_ring(job, overlapping).times(number),
        after=_ring(job, after).times(number),
        optimizer_steps=number,
    )


def _passes(
    job: Job,
    name: str,
    shape: ModelShape,
    *,
    passes: int,
    samples: int,
    micro_batches: int,
    links: Links,
    after: Links | None = None,
    has_logits: bool = True,
    optimizer_steps: int = 0,
) -> Phase:
    """Passes over `samples` sequences: 1 without gradients, 3 with, 4 with recomputation of all layers.

    Args:
        links: bytes that are sent while the GPU computes.
        after: bytes that are sent when it has nothing to compute.
        has_logits: the LM head computes the logits of the responses.
    """
    config, rates, after = job.config, job.rates, after or Links()
    head_passes = min(passes, 3) if has_logits else 0
    layer_passes = min(passes, 3) + (1 / config.actor.checkpoint_every if passes > 3 else 0)
    lengths = {"prompt": config.prompt_length, "response": config.response_length}
    computing = computing_s(rates, shape, **lengths, layer_passes=layer_passes, head_passes=head_passes)
    computing *= samples / job.num_ranks
    shard = job.memory.optimizer.device / 12  # fp32 weight and two moments; none of them on the GPU with offload
    stepping = optimizer_steps * shard * rates.adamw_ms_per_billion * 1e-12
    launching = micro_batches * shape.num_layers * rates.host_ms_per_layer / 1e3
    launching *= _FORWARD_SHARE if passes == 1 else 1.0
    sending = job.link_seconds(links)
    tokens = job.tokens * samples * job.layout.sp // job.num_ranks
    # Recomputation exchanges heads again: as often as there are passes, but for the backward pass, which counts once.
    exchanged = exchanged_bytes(shape, config.actor, tokens=tokens) * (1 if passes == 1 else passes - 1)
    over_network = links.network / config.cluster.network_gb_per_s >= links.nvlink / rates.nvlink_gb_per_s
    seconds, limit = max(
        (computing, "computing"),
        (sending, "network" if over_network else "NVLink"),
        (launching, "launching kernels"),
    )
    seconds += exchanged / rates.exchange_gb_per_s / 1e9 + job.link_seconds(after) + stepping
    return Phase(
        name=name,
        seconds=seconds,
        limit=f"{limit} ({computing:.1f} s computing, {sending:.1f} s collectives)" if sending else limit,
        waiting="servers; ranks for each other",
        links=links + after + Links(nvlink=exchanged),
    )


# ----------------------------------------------------------------------- push


def push(job: Job) -> Phase:
    """Rank 0 gathers each bucket with all ranks and sends it to all servers, while everybody waits.

    One NCCL broadcast sends every byte once over rank 0's network card, however many servers there are: it passes from
    GPU to GPU. With `ipc` every worker of rank 0's host reads every byte, for the checksum, from rank 0's GPU. `tcp`
    sends every byte to every worker of every server on another host, through that card.
    """
    config, rates = job.config, job.rates
    here, size, tp = job.placement.ranks[0], job.weight_bytes, config.rollout.tensor_parallel_size
    is_here = {str(number): slot.node == here.node for number, slot in enumerate(job.placement.servers)}
    ways = plan_transports(config.sync.transport, is_here, on_gpu=True)
    across = sum(not is_local for is_local in is_here.values()) * tp
    nearby = [slot for slot in job.placement.servers if slot.node == here.node]
    peers = sum(gpu != here.gpus[0] for slot in nearby for gpu in slot.gpus)
    copies = across if "tcp" in ways.values() else min(across, 1)
    sent = Links(nvlink=float(size * peers), network=float(size * copies))
    gathered = _ring(job, forward_traffic(job.shape, config.actor, world_size=job.num_ranks))
    # To read from its own GPU takes a worker as long as to read from another one.
    reading = size * (not peers and bool(nearby)) / rates.nvlink_gb_per_s / 1e9
    sending, gather = max(reading, job.link_seconds(sent)), job.link_seconds(gathered)
    over_network = copies * size / config.cluster.network_gb_per_s / 1e9 >= sending
    return Phase(
        name="push",
        seconds=rates.push_fixed_ms / 1e3 + gather + sending,
        limit=f"rank 0's {'network card' if over_network else 'GPU'} ({' and '.join(dict.fromkeys(ways.values()))}: "
        f"{sending:.2f} s, gather {gather:.2f} s)",
        waiting="all ranks and servers, for rank 0",
        links=sent + gathered,
    )


def _ring(job: Job, traffic: Traffic) -> Links:
    return ring_links(traffic, ranks=job.num_ranks, ranks_per_host=job.ranks_per_host)


# ----------------------------------------------------------------- checkpoint


@dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """A checkpoint, which is written in the background."""

    bytes_per_host: float
    """Of the host with the most."""
    total_bytes: float
    stall_s: float
    """The loop waits for the copy to host memory."""
    write_s: float
    """Until the files are written, if every host writes at the measured rate."""


def checkpoint(job: Job) -> CheckpointCost:
    """Optimizer states and weights: 12 bytes and one weight per parameter; below stage 3 rank 0 writes the weights."""
    shards = job.memory.optimizer
    optimizer = float(shards.device + shards.cpu + shards.nvme)
    weights = job.memory.weights.device + job.memory.weights.cpu + job.memory.weights.nvme
    is_sharded = job.config.actor.zero.stage == 3
    most = optimizer * job.ranks_per_host + weights * (job.ranks_per_host if is_sharded else 1)
    total = optimizer * job.num_ranks + weights * (job.num_ranks if is_sharded else 1)
    rates = job.rates
    return CheckpointCost(
        bytes_per_host=most,
        total_bytes=total,
        stall_s=most / rates.snapshot_gb_per_s / 1e9,
        write_s=most / rates.disk_gb_per_s / 1e9,
    )
