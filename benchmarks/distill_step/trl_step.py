"""On-policy distillation on TRL's DistillationTrainer with vLLM in its process; prints the seconds of each step.

`python -m benchmarks.distill_step.trl_step FOLDER --steps 4`; the folder is `benchmarks.distill_step.compare`'s. TRL
keeps its defaults but for the workload, the dtype, the size of micro batches and recomputation, which it does not need.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks import trl_peer
from benchmarks.grpo_step.workload import NEW_TOKENS, PROMPT_TOKENS

BATCH_SIZE = 256
"""Prompts of a step, one sample each, one update."""


def settings(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of DistillationConfig: the workload, and what TRL has no default for."""
    common = trl_peer.settings(
        folder, max_steps=args.steps, per_forward=args.per_forward, batch_size=BATCH_SIZE, cpu=args.cpu
    )
    return common | {
        "max_completion_length": args.new_tokens,
        "beta": 1.0,  # reverse KL
        "gradient_checkpointing": args.recompute,
        "use_vllm": not args.cpu,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": PROMPT_TOKENS + args.new_tokens + 8,
        "logging_strategy": "no",
        "model_init_kwargs": {"dtype": "bfloat16"},
        "teacher_model_init_kwargs": {"dtype": "bfloat16"},
    }


def main(folder: Path, args: argparse.Namespace) -> None:
    """Trains for `args.steps` optimizer steps."""
    import datasets
    from trl import DistillationConfig, DistillationTrainer

    table = datasets.Dataset.from_parquet(str(folder / "train.parquet")).rename_column("question", "prompt")
    trainer = DistillationTrainer(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=DistillationConfig(**settings(folder, args)),
        train_dataset=table,
        callbacks=[trl_peer.step_clock(on_gpu=not args.cpu)],
    )
    trainer.train()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = trl_peer.parser(__doc__, steps=4, cpu="without vLLM, to try this script")
    parser.add_argument("--per-forward", type=int, default=16, help="sequences per forward and backward pass")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    return parser


if __name__ == "__main__":
    parsed = arguments().parse_args()
    main(parsed.folder, parsed)
