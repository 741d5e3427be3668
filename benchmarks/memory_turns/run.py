"""GRPO of a 7B configuration with random weights, side by side and in turns: seconds, memory and what turns cost.

`python -m benchmarks.memory_turns.run FOLDER` runs the cases that the GPUs allow (all: two H200s), `--cases` some of
them, and prints a table. Further `section.key=value` arguments go to every run of the app. TRL does the
same work in `trl_lora` (activations recomputed), `trl_lora_kept` (activations kept, smaller forward passes) and
`trl_one` (the whole model, for an H200, with weights, gradients and AdamW states in bf16, where the app has fp32
masters, gradients and states). `--peer-args` are for TRL's script.
"""

from benchmarks.grpo_step.cases import MEMORY, Case, metric, run_cases, timings

ZERO_3 = ("actor.zero.stage=3",)
LORA = ("actor.lora.rank=16", "rollout.max_lora_rank=16")
TRL = ("benchmarks.grpo_step.trl_step", "--sleep")
CASES = {
    "one": Case(gpus=1, keys=ZERO_3),
    "one_lora": Case(gpus=1, keys=LORA),
    "one_lora_servers": Case(gpus=1, keys=(*LORA, "trainer.take_turns=servers")),
    "two": Case(gpus=2, keys=ZERO_3),
    "two_lora": Case(gpus=2, keys=LORA),
    "two_servers": Case(gpus=2, keys=(*ZERO_3, "trainer.take_turns=servers")),
    "two_both": Case(gpus=2, keys=(*ZERO_3, "trainer.take_turns=both")),
    "trl_lora": Case(gpus=1, peer=(*TRL, "--lora", "--recompute")),
    "trl_lora_kept": Case(gpus=1, peer=(*TRL, "--lora", "--per-forward=8")),
    "trl_one": Case(gpus=1, peer=(*TRL, "--recompute", "--per-forward=8")),
}
"""`take_turns` is left to the planner where it is not named."""
COLUMNS = {
    **timings("step", "gen", "old_log_prob", "update_actor", "sync", "sleep", "wake", "offload", "reload"),
    "moved GB": metric("turns/moved_gb"),
    **MEMORY,
    "mismatch": metric("rollout/log_prob_mismatch"),
}


def main() -> None:
    """The command line."""
    run_cases(__doc__, CASES, COLUMNS, model="qwen2-7b", steps=4, timeout_s=900.0)


if __name__ == "__main__":
    main()
