"""Workload W: Qwen3-0.6B's configuration with random weights, 64 prompts x 4 samples, 297 prompt and 512 new tokens.

`python -m benchmarks.grpo_step.workload FOLDER [--model NAME]` writes `model/` and `train.parquet`.
"""

import argparse
import fcntl
import random
import string
from pathlib import Path
from typing import Any

from benchmarks.random_model import CONFIGS, ensure_random_model

NUM_PROMPTS, SAMPLES, MINI_BATCH = 64, 4, 32
"""Prompts a step, samples a prompt, prompts an update: two updates of 128 sequences."""
PROMPT_TOKENS, NEW_TOKENS = 297, 512


def parity(response: str, prompt: Any) -> float:
    """1 for an even number of characters: most random tokens decode to none, so scores differ within a group."""
    return float(len(response) % 2 == 0)


def prompts(number: int) -> list[str]:
    """Texts of PROMPT_TOKENS bytes, one token each, that share no prefix."""
    letters = random.Random(0)
    return ["".join(letters.choices(string.ascii_lowercase + " ", k=PROMPT_TOKENS)) for _ in range(number)]


def write_workload(folder: Path, *, model: str = "qwen3-0.6b", num_prompts: int = NUM_PROMPTS * 64) -> None:
    """Writes the model and the prompts, unless they exist; another process that does the same waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ensure_random_model(model, folder / "model")
        if not (folder / "train.parquet").is_file():
            write_prompts(folder, num_prompts)


def write_prompts(folder: Path, number: int) -> None:
    """Writes `train.parquet` with a column `question`."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"question": prompts(number)}), folder / "train.parquet")


def settings(folder: Path, steps: int, *, num_prompts: int = NUM_PROMPTS) -> list[str]:
    """Settings of W: model, data, batch, lengths. No key tunes anything."""
    return [
        f"model.path={folder}/model",
        f"data.train={folder}/train.parquet",
        f"data.max_prompt_length={PROMPT_TOKENS + 7}",
        "reward.function=benchmarks.grpo_step.workload:parity",
        f"batch.train_batch_size={num_prompts}",
        f"batch.mini_batch_size={num_prompts // (NUM_PROMPTS // MINI_BATCH)}",
        f"sampling.n={SAMPLES}",
        f"sampling.max_tokens={NEW_TOKENS}",
        "algorithm.kl_coef=0",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    args = parser.parse_args()
    write_workload(args.folder, model=args.model)
