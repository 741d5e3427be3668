"""Do 4-bit servers compute what ranks with a 4-bit base compute? One difference a case, from none to the 7B recipe.

`python -m benchmarks.small_cards.agreement FOLDER` takes a step of workload W's prompts per case with LoRA adapters
that change nothing yet, and prints the mismatch of log-probs. A case far above `plain` has a fault in what it adds to
the cases before. `--cases` selects some. Further `section.key=value` arguments go to every run. Servers need
bitsandbytes.
"""

from benchmarks.grpo_step.cases import Case, metric, run_cases

SHORT = ("sampling.max_tokens=64", "actor.compile=false", "trainer.take_turns=never")
LORA = (*SHORT, "actor.lora.rank=16", "rollout.max_lora_rank=16")
NF4 = (*LORA, "actor.lora.base_format=nf4")
SHARDED = (*NF4, "actor.zero.stage=3", "actor.zero.offload.optimizer=cpu", "actor.zero.offload.param=cpu")
BITSANDBYTES = (*SHARDED, "rollout.quantization=bitsandbytes")
PAIR = ("trainer.num_ranks=2", "rollout.num_servers=1", "rollout.tensor_parallel_size=2")
CASES = {
    "plain": Case(gpus=1, keys=LORA),
    "nf4": Case(gpus=1, keys=NF4),
    "nf4_zero3": Case(gpus=1, keys=SHARDED),
    "bitsandbytes": Case(gpus=1, keys=BITSANDBYTES),
    "tensor_parallel": Case(gpus=2, keys=(*LORA, *PAIR)),
    "pair": Case(gpus=2, keys=(*BITSANDBYTES, *PAIR)),
    "pair_in_turns": Case(gpus=2, keys=(*BITSANDBYTES, *PAIR, "trainer.take_turns=servers")),
}
"""With `nf4` and `nf4_zero3` servers get the ranks' rounded base; from `bitsandbytes` on, they round it themselves."""
COLUMNS = {
    "mismatch": metric("rollout/log_prob_mismatch", skip=0),
    "effective sample size": metric("rollout/mismatch_ess", skip=0),
}


def main() -> None:
    """The command line."""
    run_cases(__doc__, CASES, COLUMNS, steps=1, timeout_s=300.0)


if __name__ == "__main__":
    main()
