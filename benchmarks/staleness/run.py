"""Workload W with asynchronous rollout: servers and ranks on GPUs of their own, or sharing them.

`python -m benchmarks.staleness.run FOLDER` runs cases on the first two GPUs and prints a table. Cases that end in
`_long` have responses of log-normal lengths; `--gpus 1` takes one GPU (for the cases that share it); further
`section.key=value` arguments go to every run of the app. `trl_async` is TRL's AsyncGRPOTrainer in place of
`apart_1`.
"""

import math
import operator
from statistics import fmean

from benchmarks.grpo_step.cases import SPEED, Case, Column, Result, run_cases
from benchmarks.staleness.long_tail import MOST_TOKENS

APART = ("trainer.colocate=false", "trainer.num_ranks=1", "rollout.num_servers=1")
AHEAD = ("trainer.max_staleness=1",)
LONG_TAIL = ("episode.function=benchmarks.staleness.long_tail:respond", f"sampling.max_tokens={MOST_TOKENS}")
KEYS = {
    "shared": (),
    "apart": APART,
    "apart_1": (*APART, *AHEAD),
    "shared_1": AHEAD,
    "apart_1_cut": (*APART, *AHEAD, "sync.running_requests=wait"),
    "apart_1_recompute": (*APART, *AHEAD, "sync.running_requests=recompute"),
    "shared_1_cut": (*AHEAD, "sync.running_requests=wait"),
}
"""GPUs shared by ranks and servers or not, and the staleness."""
CASES = {
    **{name: Case(gpus=2, keys=keys) for name, keys in KEYS.items()},
    **{f"{name}_long": Case(gpus=2, keys=(*keys, *LONG_TAIL)) for name, keys in KEYS.items()},
    "trl_async": Case(gpus=2, peer=("benchmarks.staleness.trl_async",)),
}
NAMES = ("step", "gen", "old_log_prob", "update_actor", "sync")
MORE = ("rollout/busy_s", "rollout/trainer_wait_s", "rollout/servers_wait_s", "staleness/max", "rollout/correction_ess")
SKIP = 2
"""Steps that still compile, or begin with groups that were generated meanwhile."""


def middle(result: Result, name: str) -> list[float]:
    """A metric of all steps but the first two and the last, beside which no rollout runs ahead."""
    return result.steps.series(name, skip=SKIP)[:-1]


def mean(name: str) -> Column:
    """Of a metric. Steps that run ahead alternate, so their median says little."""
    return lambda result: fmean(middle(result, name) or [math.nan])


def throughput(result: Result) -> float:
    """Tokens per second and GPU."""
    seconds, rates = middle(result, "timing_s/step"), middle(result, "perf/throughput")
    return sum(map(operator.mul, seconds, rates)) / sum(seconds) if seconds else math.nan


COLUMNS = {
    **{f"timing_s/{phase}": mean(f"timing_s/{phase}") for phase in NAMES},
    **SPEED,
    "tokens/s per GPU": throughput,
    **{name: mean(name) for name in MORE},
}
"""Means over the steps, less the first two and the last."""
DEFAULT = ("shared", "apart", "apart_1", "shared_1")


def main() -> None:
    """The command line."""
    run_cases(__doc__, CASES, COLUMNS, default=DEFAULT, steps=8, timeout_s=300.0)


if __name__ == "__main__":
    main()
