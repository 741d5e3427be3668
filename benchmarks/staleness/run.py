"""Workload W with asynchronous rollout: servers and ranks on GPUs of their own, or sharing them.

`python -m benchmarks.staleness.run FOLDER` runs cases on the first two GPUs and prints a table. Cases that end in
`_long` have responses of log-normal lengths; `--gpus 1` takes one GPU (for the cases that share it); further
`section.key=value` arguments go to every run of the app. `trl_async` is TRL's AsyncGRPOTrainer in place of
`apart_1`.
"""

from benchmarks.grpo_step.cases import SPEED, Case, metric, run_cases
from benchmarks.staleness.long_tail import MOST_TOKENS

APART = ("trainer.colocate=false", "trainer.num_ranks=1", "rollout.num_servers=1")
AHEAD = ("trainer.max_staleness=1",)
LONG_TAIL = ("episode.function=benchmarks.staleness.long_tail:respond", f"sampling.max_tokens={MOST_TOKENS}")
KEYS = {
    "shared": (),
    "apart": APART,
    "apart_1": (*APART, *AHEAD),
    "shared_1": AHEAD,
    "apart_1_keep": (*APART, *AHEAD, "sync.running_requests=keep"),
    "apart_1_recompute": (*APART, *AHEAD, "sync.running_requests=recompute"),
    "shared_1_keep": (*AHEAD, "sync.running_requests=keep"),
}
"""GPUs shared by ranks and servers or not, and the staleness."""
CASES = {
    **{name: Case(gpus=2, keys=keys) for name, keys in KEYS.items()},
    **{f"{name}_long": Case(gpus=2, keys=(*keys, *LONG_TAIL)) for name, keys in KEYS.items()},
    "trl_async": Case(gpus=2, peer=("benchmarks.staleness.trl_async",)),
}
NAMES = ("step", "gen", "old_log_prob", "update_actor", "sync")
MORE = ("rollout/busy_s", "staleness/max", "rollout/correction_ess")
COLUMNS = {
    **{f"timing_s/{phase}": metric(f"timing_s/{phase}", skip=2) for phase in NAMES},
    **SPEED,
    **{name: metric(name, skip=2) for name in MORE},
}
"""Seconds are medians over the steps after the second, which still compiles."""
DEFAULT = ("shared", "apart", "apart_1", "shared_1")


def main() -> None:
    """The command line."""
    run_cases(__doc__, CASES, COLUMNS, default=DEFAULT, steps=8, timeout_s=300.0)


if __name__ == "__main__":
    main()
