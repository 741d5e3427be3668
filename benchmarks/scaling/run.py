"""GRPO on more GPUs and with larger models: throughput per GPU, MFU, memory beside its plan, the collective guard.

`python -m benchmarks.scaling.run FOLDER --cases w_1 w_2` runs workload W with a batch grown in proportion to the GPUs,
`w_1_stale` and so on the same at `trainer.max_staleness=1`; `w_killed` kills a rank. `turns`, `turns_sp2`, `turns_sp4`,
`apart` and `apart_sp2` have 4,096 tokens of response at ZeRO-3, for `--model qwen2-7b`. `whole` is W at ZeRO-3 on all
GPUs, for models of several sizes, each in its own folder. `samples_4`, `samples_8` and `samples_16` are W on one GPU
with so many samples a prompt, `budget_8`, `budget_16` and `budget_32` with micro batches of so many times 1,024 tokens.
`tail_4` has long-tailed lengths (benchmarks/staleness/long_tail.py), `tail_4_drafts` with `rollout.speculative`; in
`full_tail_4` samples wait for servers. Every run has the collective guard. Further `section.key=value` arguments go to
every run.
"""

from benchmarks.grpo_step.cases import GUARD, MEMORY, SPEED, Case, metric, run_cases, timings
from benchmarks.grpo_step.workload import NUM_PROMPTS
from benchmarks.staleness.run import LONG_TAIL

GUARDED = ("actor.collective_guard=auto",)
STALE = (*GUARDED, "trainer.max_staleness=1")
ZERO_3 = (*GUARDED, "actor.zero.stage=3")
LONG = (*ZERO_3, "sampling.max_tokens=4096")
TURNS = (*LONG, "trainer.take_turns=both")
APART = (*LONG, "trainer.colocate=false", "trainer.num_ranks=4", "rollout.num_servers=4")
TAIL = (*GUARDED, *LONG_TAIL)
FULL = (*TAIL, "sampling.n=8")
FEW = 16
"""Prompts of a step with long responses."""
SIZES = (1, 2, 4, 8)
CASES = {
    **{f"w_{n}": Case(gpus=n, keys=GUARDED, num_prompts=n * NUM_PROMPTS, relative_to="w_1") for n in SIZES},
    **{f"w_{n}_stale": Case(gpus=n, keys=STALE, num_prompts=n * NUM_PROMPTS, relative_to="w_1_stale") for n in SIZES},
    "w_killed": Case(gpus=8, keys=(*ZERO_3, "trainer.save_freq=1"), num_prompts=4 * NUM_PROMPTS, kill_after=2),
    "turns": Case(gpus=4, keys=TURNS, num_prompts=FEW),
    "turns_sp2": Case(gpus=4, keys=(*TURNS, "actor.sequence_parallel=2"), num_prompts=FEW),
    "turns_sp4": Case(gpus=4, keys=(*TURNS, "actor.sequence_parallel=4"), num_prompts=FEW),
    "apart": Case(gpus=8, keys=APART, num_prompts=FEW),
    "apart_sp2": Case(gpus=8, keys=(*APART, "actor.sequence_parallel=2"), num_prompts=FEW),
    "whole": Case(gpus=8, keys=ZERO_3),
    **{f"samples_{n}": Case(gpus=1, keys=(*GUARDED, f"sampling.n={n}"), relative_to="samples_4") for n in (4, 8, 16)},
    **{f"budget_{n}": Case(gpus=1, keys=(*GUARDED, f"batch.token_budget={n * 1024}")) for n in (8, 16, 32)},
    "tail_4": Case(gpus=4, keys=TAIL, num_prompts=4 * NUM_PROMPTS),
    "tail_4_drafts": Case(gpus=4, keys=(*TAIL, "rollout.speculative=ngram"), num_prompts=4 * NUM_PROMPTS),
    "full_tail_4": Case(gpus=4, keys=FULL, num_prompts=8 * NUM_PROMPTS),
}
COLUMNS = {
    **timings("step", "gen", "old_log_prob", "update_actor", "sync", "sleep", "wake", "offload", "reload"),
    **SPEED,
    **MEMORY,
    **GUARD,
    "mismatch": metric("rollout/log_prob_mismatch"),
    "tokens a step with drafts": metric("rollout/tokens_per_step"),
}


def main() -> None:
    """The command line."""
    run_cases(__doc__, CASES, COLUMNS, steps=5, timeout_s=560.0)


if __name__ == "__main__":
    main()
