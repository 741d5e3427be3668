"""Proposes how to divide GPUs between trainer and servers that work at the same time, from measured steps."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from run_kit.tracking.metrics_table import MetricsTable

_WORTH = 0.95
"""Share of a step's time that a proposed split has to stay below."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """GPUs of each side, and the seconds that a step would take."""

    num_ranks: int
    num_servers: int
    step_s: float


def propose_split(
    train_gpu_s: float,
    gen_gpu_s: float,
    *,
    num_gpus: int,
    gpus_per_server: int = 1,
    fits: Callable[[int], bool] = lambda _: True,
) -> Split | None:
    """The split of `num_gpus` whose slower side is fastest, if time is inversely proportional to GPUs; None: none fits.

    Both sides work at the same time, on GPUs of their own, so a step takes as long as the slower one. Of equal splits
    the one with the most ranks.

    Args:
        train_gpu_s: seconds of a step for which the trainer works, times its GPUs; `gen_gpu_s`: those of the servers.
        fits: whether the batch divides over a number of ranks.
    """
    splits = [
        Split(
            num_ranks=num_ranks,
            num_servers=num_servers,
            step_s=max(train_gpu_s / num_ranks, gen_gpu_s / (num_servers * gpus_per_server)),
        )
        for num_ranks in range(1, num_gpus)
        if fits(num_ranks) and (num_servers := (num_gpus - num_ranks) // gpus_per_server)
    ]
    return min(splits, key=lambda split: (split.step_s, -split.num_ranks), default=None)


def measured_sides(table: MetricsTable, *, is_ahead: bool) -> tuple[float, float] | None:
    """Seconds of a step for which the trainer and the servers work; None with fewer than two steps.

    Medians over the steps after the first, which compiles.
    The trainer works while it does not wait for samples (`timing_s/gen`). The servers work in that time, or, if they
    generate ahead, for `rollout/busy_s`.
    """
    steps, step_s = table.series("timing_s/step")
    wait_s, busy_s = (dict(zip(*table.series(name), strict=True)) for name in ("timing_s/gen", "rollout/busy_s"))
    rows = [(seconds, wait_s[step], busy_s.get(step, 0.0)) for step, seconds in zip(steps, step_s, strict=True)][1:]
    if not rows:
        return None
    train_s = median(seconds - wait for seconds, wait, _ in rows)
    return train_s, median(busy if is_ahead else wait for _, wait, busy in rows)


def describe_split(split: Split | None, *, step_s: float, max_staleness: int) -> str:
    """The proposal in one line; empty if it promises less than 5%."""
    if split is None or split.step_s > step_s * _WORTH:
        return ""
    return (
        f"if time scales with GPUs, {split.num_ranks} for ranks and the others for {split.num_servers} servers take "
        f"{split.step_s:.1f} s a step instead of {step_s:.1f}: trainer.colocate=false "
        f"trainer.num_ranks={split.num_ranks} rollout.num_servers={split.num_servers} "
        f"trainer.max_staleness={max(1, max_staleness)}"
    )
