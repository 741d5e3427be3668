"""On-policy distillation on TRL's DistillationTrainer with vLLM in its process; prints the seconds of each step.

`python -m benchmarks.distill_step.trl_step FOLDER --steps 4`; the folder is `benchmarks.distill_step.compare`'s. TRL
keeps its defaults but for the workload, the dtype, the size of micro batches and recomputation, which it does not need.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.grpo_step.workload import NEW_TOKENS, PROMPT_TOKENS

BATCH_SIZE = 256
"""Prompts of a step, one sample each, one update."""


def settings(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of DistillationConfig: the workload, and what TRL has no default for."""
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.per_forward,
        "gradient_accumulation_steps": BATCH_SIZE // args.per_forward,
        "max_completion_length": args.new_tokens,
        "beta": 1.0,  # reverse KL
        "bf16": not args.cpu,
        "use_cpu": args.cpu,
        "gradient_checkpointing": args.recompute,
        "use_vllm": not args.cpu,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": PROMPT_TOKENS + args.new_tokens + 8,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "teacher_model_init_kwargs": {"dtype": "bfloat16"},
    }


def main(folder: Path, args: argparse.Namespace) -> None:
    """Trains for `args.steps` optimizer steps."""
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    class Clock(TrainerCallback):
        """Prints a line a step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            peak = 0.0 if args.cpu else torch.cuda.max_memory_reserved() / 1e9
            print(f"trl step {state.global_step}: {now - self.last:.2f} s, {peak:.1f} GB reserved", flush=True)
            self.last = now

    table = datasets.Dataset.from_parquet(str(folder / "train.parquet")).rename_column("question", "prompt")
    trainer = DistillationTrainer(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=DistillationConfig(**settings(folder, args)),
        train_dataset=table,
        callbacks=[Clock()],
    )
    trainer.train()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--per-forward", type=int, default=16, help="sequences per forward and backward pass")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--cpu", action="store_true", help="without vLLM, to try this script")
    return parser


if __name__ == "__main__":
    parsed = arguments().parse_args()
    main(parsed.folder, parsed)
