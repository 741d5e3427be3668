"""The preset smollm2 on TRL's GRPOTrainer: the same model, problems, reward and hyperparameters.

`python -m benchmarks.learning.trl_learn FOLDER --steps 100 --seed 1` prints the mean score of each rollout and the
seconds since the process started, as JSON lines. vLLM is in the same process; weights are float32 with bfloat16
autocast, as the preset keeps float32 master weights.
"""

import argparse
import json
import time
from typing import Any

from benchmarks import trl_peer

STARTED = time.time()
NUM_PROMPTS, MINI_BATCH, SAMPLES, NEW_TOKENS, LEARNING_RATE = 64, 32, 8, 64, 1e-5
"""Those of apps/grpo/presets/smollm2.yaml."""


def train(args: argparse.Namespace) -> None:
    """Trains for `args.steps` rollouts of two updates each."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    from rl_data import RewardConfig
    from rl_data.rewards.gsm8k import gsm8k_score
    from rl_data.tasks.fetched import fetch

    rule = RewardConfig(method="flexible")

    def score(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        truths = [text.rpartition("####")[2].strip() for text in answer]
        scores = [gsm8k_score(text, truth, rule) for text, truth in zip(texts, truths, strict=True)]
        print(json.dumps({"seconds": time.time() - STARTED, "score": sum(scores) / len(scores)}), flush=True)
        return scores

    table = datasets.Dataset.from_parquet(str(fetch("fetched:sums/train")))
    table = table.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}, remove_columns="question")
    updates = NUM_PROMPTS // MINI_BATCH
    config = GRPOConfig(
        **trl_peer.settings(
            args.folder,
            max_steps=args.steps * updates,
            per_forward=args.per_forward,
            batch_size=MINI_BATCH * SAMPLES,
            cpu=args.cpu,
        ),
        seed=args.seed,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        beta=0.0,
        generation_batch_size=NUM_PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        use_vllm=not args.cpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=160,
        logging_strategy="no",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(fetch("fetched:smollm2")),
        reward_funcs=score,
        args=config,
        train_dataset=table,
        callbacks=[trl_peer.step_clock(on_gpu=not args.cpu, updates=updates)],
    )
    trainer.train()


def main() -> None:
    """The command line."""
    parser = trl_peer.parser(__doc__, steps=100, cpu="without vLLM, to try this script")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-forward", type=int, default=256, help="sequences per forward and backward pass")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
