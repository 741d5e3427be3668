"""The forecast as text."""

from collections.abc import Iterator

from apps.forecast.config import ForecastConfig
from apps.forecast.links import Links
from apps.forecast.phases import CheckpointCost, Job, Phase, checkpoint, sequences_at_once, step_phases
from rl_runtime.app.choice import Choice

_ROW = "{:<15}{:>9}{:>12}{:>13}  {:<62}{}"


def report(choice: Choice[ForecastConfig], job: Job) -> list[str]:
    """The lines of the forecast."""
    phases = step_phases(job)
    return [
        *_sizes(job),
        *choice.lines(),
        "",
        _ROW.format("phase", "seconds", "NVLink GB", "network GB", "limited by", "who waits"),
        *(_row(phase.name, phase.seconds, phase.links, phase.limit, phase.waiting) for phase in phases),
        _total(job, phases),
        "",
        *_checkpoint(checkpoint(job), job),
        "Bytes are those that a GPU sends (it receives as many); in the push, rank 0's. Scoring is not in the step.",
        "All responses have the mean length: a real step waits for the longest.",
        f"Assumed, not measured: {job.config.cluster.network_gb_per_s:g} GB/s of network per GPU. Rates: --help rates",
    ]


def _sizes(job: Job) -> Iterator[str]:
    config, cluster = job.config, job.config.cluster
    yield (
        f"{job.memory.num_parameters / 1e9:.2f}B parameters on {cluster.num_hosts} x {cluster.gpus_per_host} GPUs: "
        f"{job.num_ranks} ranks (dp {job.layout.dp}, sp {job.layout.sp}, ZeRO-{config.actor.zero.stage}), "
        f"{config.rollout.server_count} servers (tp {config.rollout.tensor_parallel_size}, "
        f"{sequences_at_once(job)} sequences at once)"
    )
    yield (
        f"{job.num_samples:,} samples of {config.prompt_length} + {config.response_length} tokens, "
        f"{job.num_updates} updates of {job.layout.train_batch_size:,} sequences, "
        f"{job.micro_batches(job.layout.train_batch_size // job.layout.dp)} micro batches each"
    )


def _row(name: str, seconds: float, links: Links, limit: str, waiting: str = "") -> str:
    return _ROW.format(name, f"{seconds:.2f}", _gb(links.nvlink), _gb(links.network), limit, waiting).rstrip()


def _total(job: Job, phases: list[Phase]) -> str:
    seconds = sum(phase.seconds for phase in phases)
    per_gpu = job.num_samples * job.tokens / seconds / job.placement.num_gpus
    return _row("step", seconds, sum((phase.links for phase in phases), Links()), f"{per_gpu:,.0f} tokens/s per GPU")


def _checkpoint(cost: CheckpointCost, job: Job) -> Iterator[str]:
    freq = job.config.trainer.save_freq
    yield (
        f"checkpoint: {cost.total_bytes / 1e9:,.0f} GB, {cost.bytes_per_host / 1e9:,.0f} GB of a host; the loop waits "
        f"{cost.stall_s:.1f} s, written after {cost.write_s:,.0f} s if every host has a disk of that rate"
        + (f", every {freq} steps" if freq else "; trainer.save_freq=0 writes none")
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size else "-"
