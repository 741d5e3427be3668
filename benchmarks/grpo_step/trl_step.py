"""Workload W on TRL's GRPOTrainer with vLLM in the same process; prints the seconds of each rollout step.

`python -m benchmarks.grpo_step.trl_step FOLDER --steps 4`; the folder is `benchmarks.grpo_step.workload`'s. With
`--lora --sleep` it is the peer of `benchmarks.memory_turns`: adapters of rank 16, activations recomputed, and a vLLM
that sleeps while the trainer works.
"""

from pathlib import Path
from typing import Any

from benchmarks import trl_peer
from benchmarks.grpo_step.workload import MINI_BATCH, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, parity

PER_FORWARD = 32
"""Sequences per forward and backward pass."""


def score(completions: list[str], **_: Any) -> list[float]:
    """W's reward."""
    return [parity(completion, None) for completion in completions]


def main(folder: Path, *, steps: int, vllm: bool, new_tokens: int, lora: bool, sleep: bool) -> None:
    """Trains for `steps` rollouts of two updates each."""
    import datasets
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    updates = NUM_PROMPTS // MINI_BATCH

    table = datasets.Dataset.from_parquet(str(folder / "train.parquet")).rename_column("question", "prompt")
    sizes = trl_peer.settings(
        folder, max_steps=steps * updates, per_forward=PER_FORWARD, batch_size=MINI_BATCH * SAMPLES, cpu=not vllm
    )
    config = GRPOConfig(
        **sizes,
        generation_batch_size=NUM_PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=new_tokens,
        beta=0.0,
        gradient_checkpointing=lora,
        use_vllm=vllm,
        vllm_enable_sleep_mode=sleep,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=PROMPT_TOKENS + NEW_TOKENS + 8,
        logging_strategy="no",
        model_init_kwargs={"dtype": "bfloat16"},
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=score,
        args=config,
        train_dataset=table,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if lora else None,
        callbacks=[trl_peer.step_clock(on_gpu=vllm, updates=updates)],
    )
    trainer.train()


if __name__ == "__main__":
    parser = trl_peer.parser(__doc__, steps=4, cpu="without vLLM, to try this script")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--lora", action="store_true", help="adapters; activations are recomputed")
    parser.add_argument("--sleep", action="store_true", help="vLLM sleeps while the trainer works")
    args = parser.parse_args()
    main(
        args.folder,
        steps=args.steps,
        vllm=not args.cpu,
        new_tokens=args.new_tokens,
        lora=args.lora,
        sleep=args.sleep,
    )
