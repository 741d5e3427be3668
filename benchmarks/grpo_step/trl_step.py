"""Workload W on TRL's GRPOTrainer with vLLM in the same process; prints the seconds of each rollout step.

`python -m benchmarks.grpo_step.trl_step FOLDER --steps 4`; the folder is `benchmarks.grpo_step.workload`'s. With
`--sleep` it is the peer of `benchmarks.memory_turns`: vLLM sleeps while the trainer works. `--lora` trains adapters of
rank 16.
"""

import argparse
from typing import Any

from benchmarks import trl_peer
from benchmarks.grpo_step.workload import MINI_BATCH, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, parity


def score(completions: list[str], **_: Any) -> list[float]:
    """W's reward."""
    return [parity(completion, None) for completion in completions]


def train(args: argparse.Namespace) -> None:
    """Trains for `args.steps` rollouts of two updates each."""
    import datasets
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    updates, folder, vllm = NUM_PROMPTS // MINI_BATCH, args.folder, not args.cpu
    table = datasets.Dataset.from_parquet(str(folder / "train.parquet")).rename_column("question", "prompt")
    sizes = trl_peer.settings(
        folder,
        max_steps=args.steps * updates,
        per_forward=args.per_forward,
        batch_size=MINI_BATCH * SAMPLES,
        cpu=args.cpu,
    )
    config = GRPOConfig(
        **sizes,
        generation_batch_size=NUM_PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=args.new_tokens,
        beta=0.0,
        gradient_checkpointing=args.recompute,
        use_vllm=vllm,
        vllm_enable_sleep_mode=args.sleep,
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
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if args.lora else None,
        callbacks=[trl_peer.step_clock(on_gpu=vllm, updates=updates)],
    )
    trainer.train()


def main() -> None:
    """The command line."""
    parser = trl_peer.parser(__doc__, steps=4, cpu="without vLLM, to try this script")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--sleep", action="store_true", help="vLLM sleeps while the trainer works")
    parser.add_argument("--per-forward", type=int, default=32, help="sequences per forward and backward pass")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
