"""Workload S: supervised fine-tuning on prompts with completions of lognormal lengths, 64 a step, at most 2,048 tokens.

`python -m benchmarks.sft_step.workload FOLDER [--model NAME] [--steps N]` writes `model/` and `train.parquet`. The
model has a real configuration and random weights, and a tokenizer with one token per byte.
"""

import argparse
import random
import string
from pathlib import Path

from benchmarks.random_model import CONFIGS, ensure_random_model

BATCH_SIZE = 64
"""Demonstrations of a step."""
MAX_TOKENS = 2048
PROMPT_LOG_MEAN, RESPONSE_LOG_MEAN, LOG_STD = 5.0, 6.2, 0.8
"""Medians of 148 and 493 tokens, as in mixtures of instructions; the longest are cut at `MAX_TOKENS`."""


def lengths(number: int) -> list[tuple[int, int]]:
    """(prompt tokens, completion tokens) of each demonstration; with the end-of-sequence token at most `MAX_TOKENS`."""
    chance = random.Random(0)
    measured = []
    for _ in range(number):
        prompt = min(int(chance.lognormvariate(PROMPT_LOG_MEAN, LOG_STD)) + 1, MAX_TOKENS // 2)
        completion = min(int(chance.lognormvariate(RESPONSE_LOG_MEAN, LOG_STD)) + 1, MAX_TOKENS - 1 - prompt)
        measured.append((prompt, completion))
    return measured


def rows(number: int) -> list[dict[str, str]]:
    """Demonstrations of lower-case letters."""
    letters = random.Random(1)

    def text(length: int) -> str:
        return "".join(letters.choices(string.ascii_lowercase, k=length))

    return [{"prompt": text(prompt), "completion": text(completion)} for prompt, completion in lengths(number)]


def write_workload(folder: Path, *, model: str, num_steps: int) -> None:
    """Writes the model, unless it exists, and demonstrations for `num_steps` steps."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    ensure_random_model(model, folder / "model")
    table = pyarrow.Table.from_pylist(rows(BATCH_SIZE * num_steps))
    pyarrow.parquet.write_table(table, folder / "train.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    write_workload(args.folder, model=args.model, num_steps=args.steps)
