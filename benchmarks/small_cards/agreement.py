"""Which part of the 7B recipe for two small cards makes servers and ranks compute different policies?

`python -m benchmarks.small_cards.agreement FOLDER` takes one GRPO step of the recipe's model, with random
weights, in each case, and prints the mismatch of log-probs. A case has some parts of the recipe: its ranks, its server,
or tensor parallelism alone; `recipe` has all of them, without small GPUs. The adapters do not change the model yet.
`--cases` selects some. Further `section.key=value` arguments go to every run. Servers need bitsandbytes.
"""

from benchmarks.grpo_step.cases import Case, metric, run_cases

COMMON = (
    "sampling.max_tokens=64",
    "actor.compile=false",
    "actor.gradient_checkpointing=true",
    "actor.lora.rank=16",
    "rollout.max_lora_rank=16",
    "rollout.num_servers=1",
    "batch.micro_batch_size=1",
    "batch.token_budget=null",
)
NF4 = ("actor.lora.base_format=nf4",)
RANKS = (
    *NF4,
    "trainer.num_ranks=2",
    "actor.zero.stage=3",
    "actor.zero.offload={optimizer: cpu, param: cpu}",
    "actor.zero.deepspeed={stage3_max_live_parameters: 100000000, stage3_max_reuse_distance: 0}",
)
SERVER = (*NF4, "rollout.quantization=bitsandbytes")
PAIR = ("rollout.tensor_parallel_size=2",)
TOGETHER = ("trainer.take_turns=never",)
IN_TURNS = ("trainer.take_turns=servers",)
CASES = {
    "recipe": Case(gpus=2, keys=(*COMMON, *RANKS, *SERVER, *PAIR, *IN_TURNS)),
    "ranks": Case(gpus=2, keys=(*COMMON, *RANKS, *TOGETHER)),
    "server": Case(gpus=1, keys=(*COMMON, *SERVER, *TOGETHER)),
    "tensor_parallel": Case(gpus=2, keys=(*COMMON, *PAIR, "trainer.num_ranks=2", *TOGETHER)),
    "server_pair": Case(gpus=2, keys=(*COMMON, *SERVER, *PAIR, "trainer.num_ranks=2", *TOGETHER)),
    "server_in_turns": Case(gpus=1, keys=(*COMMON, *SERVER, *IN_TURNS)),
    "nf4": Case(gpus=1, keys=(*COMMON, *NF4, *TOGETHER)),
}
"""In `ranks`, `nf4` and `tensor_parallel` the server gets the ranks' base; in the others it rounds its own."""
COLUMNS = {
    "mismatch": metric("rollout/log_prob_mismatch", skip=0),
    "effective sample size": metric("rollout/mismatch_ess", skip=0),
}


def main() -> None:
    """The command line."""
    run_cases(__doc__, CASES, COLUMNS, model="qwen2-7b", steps=1, timeout_s=300.0)


if __name__ == "__main__":
    main()
