"""Workload V on TRL's GRPOTrainer with vLLM in the same process; prints its seconds of each step and the mismatch.

`python -m benchmarks.vision_step.trl_step FOLDER --steps 4`; the folder is `benchmarks.vision_step.workload`'s.
"""

import argparse
from typing import Any

from benchmarks import trl_peer
from benchmarks.grpo_step.workload import parity
from benchmarks.vision_step.workload import MAX_PROMPT_TOKENS, NEW_TOKENS, NUM_PROMPTS, QUESTION, SAMPLES

MISMATCH = "sampling/sampling_logp_difference/mean"


def score(completions: list[Any], **_: Any) -> list[float]:
    """V's reward."""
    return [parity(one if isinstance(one, str) else one[0]["content"], None) for one in completions]


def train(args: argparse.Namespace) -> None:
    """Trains all weights, the tower's too, for so many steps."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    rows = [
        {"prompt": [{"role": "user", "content": QUESTION}], "image": str(args.folder / f"{number}.png")}
        for number in range(64)
    ]
    sizes = trl_peer.settings(
        args.folder,
        max_steps=args.steps,
        per_forward=args.per_forward,
        batch_size=NUM_PROMPTS * SAMPLES,
        cpu=args.cpu,
    )
    config = GRPOConfig(
        **sizes,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        beta=0.0,
        gradient_checkpointing=True,
        use_vllm=not args.cpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=MAX_PROMPT_TOKENS + NEW_TOKENS,
        logging_steps=1,
        model_init_kwargs={"dtype": "bfloat16"},
        generation_kwargs={} if args.cpu else {"ignore_eos": True},
    )
    trainer = GRPOTrainer(
        model=str(args.folder / "model"),
        reward_funcs=score,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()),
        callbacks=[trl_peer.step_clock(on_gpu=not args.cpu)],
    )
    trainer.train()
    for number, line in enumerate((each for each in trainer.state.log_history if "step_time" in each), 1):
        print(f"trl own step_time {number}: {line['step_time']:.2f} s, mismatch {line.get(MISMATCH, 0.0):.4f}")


def main() -> None:
    """The command line."""
    parser = trl_peer.parser(__doc__, steps=4, cpu="without vLLM, to try this script")
    parser.add_argument("--per-forward", type=int, default=8, help="sequences per forward and backward pass")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
