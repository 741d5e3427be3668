"""Workload S on TRL's SFTTrainer; prints tokens, seconds and peak memory of each step as JSON lines.

`python -m benchmarks.sft_step.trl_step FOLDER --steps 12 [--lora]`; the folder is `benchmarks.sft_step.workload`'s. It
keeps TRL's own defaults but for the workload, the size of micro batches and whether activations are recomputed.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import trl_peer
from benchmarks.sft_step.workload import BATCH_SIZE, MAX_TOKENS

LORA_RANK, LORA_ALPHA = 16, 32


def settings(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of SFTConfig: what S is, and what TRL has no default for."""
    common = trl_peer.settings(
        folder, max_steps=args.steps, per_forward=args.per_forward, batch_size=BATCH_SIZE, cpu=args.cpu
    )
    return common | {
        "max_length": MAX_TOKENS,
        "packing": args.packing,
        "padding_free": args.padding_free,
        "gradient_checkpointing": args.recompute,
        "learning_rate": 1e-4 if args.lora else 1e-5,
        "logging_steps": 1,
        "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": args.attention},
    }


def main(folder: Path, args: argparse.Namespace) -> None:
    """Trains for `args.steps` optimizer steps."""
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        """Prints one line per step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last, self.tokens = time.perf_counter(), 0.0

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" not in logs or not state.is_world_process_zero:  # the summary at the end, and other ranks
                return
            now, tokens = time.perf_counter(), float(logs["num_tokens"])
            peak = 0 if args.cpu else torch.cuda.max_memory_reserved()
            line = {"step": state.global_step, "tokens": tokens - self.tokens, "seconds": now - self.last}
            print(json.dumps({**line, "peak_gb": peak / 1e9}), flush=True)
            self.last, self.tokens = now, tokens

    trainer = SFTTrainer(
        model=str(folder / "model"),
        args=SFTConfig(**settings(folder, args)),
        train_dataset=datasets.Dataset.from_parquet(str(folder / "train.parquet")),
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear") if args.lora else None,
        callbacks=[Clock()],
    )
    trainer.train()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = trl_peer.parser(__doc__, steps=12, cpu="to try this script")
    parser.add_argument("--per-forward", type=int, default=8, help="sequences per forward and backward pass")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--padding-free", action="store_true", help="needs flash-attn")
    parser.add_argument("--attention", default="sdpa")
    return parser


if __name__ == "__main__":
    parsed = arguments().parse_args()
    main(parsed.folder, parsed)
