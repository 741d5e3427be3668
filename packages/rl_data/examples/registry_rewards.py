"""Trains with two rewards of the registry: programs that run in the sandbox, and fractions. On two CPU cores:

    python packages/rl_data/examples/registry_rewards.py example
    for reward in code math; do
        plinth grpo preset=demo model.path=example/model data.train=example/$reward/train.jsonl \\
            data.val=example/$reward/val.jsonl warm_start.files=example/$reward/demonstrations.jsonl \\
            data.columns.prompt=question data.columns.ground_truth=solution reward.terms.correct.function=$reward \\
            trainer.total_training_steps=20 reward.num_workers=2
    done

`code`: `Write f(a, b): the sum of a and the product of b and 3` is answered by a program, and the solution is its test.
Demonstrations confuse each of the two operators half of the time. The sandbox needs 0.2 s of CPU time for a program.

`math`: `What is 1/6 + 2/6?` is answered by a fraction, which is right if it equals the solution, reduced or not. In six
of ten demonstrations the denominators are added too.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import rl_data
from rl_data.tasks.tiny_model import EOS_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN, VOCABULARY_SIZE

PIECES = (
    *("Write f(a, b): ", "the sum of ", "the difference of ", "the product of ", " and ", "a", "b", "\n"),
    *("```python\n", "def f(a, b):\n    return ", " + ", " - ", " * ", "(", ")", "\n```"),
    *("What is ", "/", "?", "\\boxed{\\frac{", "}{", "}}", *"0123456789"),
)
"""The texts of the tokens."""
OPERATORS = {"sum": "+", "difference": "-", "product": "*"}
LEAVES = ("a", "b", *"23456789")
INPUTS = ((2, 5), (-3, 4), (7, -6))
CONFUSED_SHARE = 0.5
"""Share of wrong operators in the demonstrations."""
ADDED_SHARE = 0.6
"""Share of demonstrations that add the denominators."""

Row = dict[str, Any]
MakeRow = Callable[[random.Random, bool], Row]


def build_tokenizer() -> Any:
    """A tokenizer whose tokens are `PIECES`; decoding joins them unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN)
    reserved = (f"<reserved_{index}>" for index in range(VOCABULARY_SIZE - len(special) - len(PIECES)))
    ids = {piece: index for index, piece in enumerate((*special, *PIECES, *reserved))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN_TOKEN))
    longest_first = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def code_row(rng: random.Random, is_demonstration: bool) -> Row:
    """A question for a program with its tests, or with an answer that may be wrong."""
    x, y, z = rng.choices(LEAVES, k=3)
    outer, inner = rng.choices(list(OPERATORS), k=2)
    question = f"Write f(a, b): the {outer} of {x} and the {inner} of {y} and {z}"
    if is_demonstration:
        outer, inner = (_confused(rng, operator) for operator in (outer, inner))
    expression = f"{x} {OPERATORS[outer]} ({y} {OPERATORS[inner]} {z})"
    if is_demonstration:
        return {"question": question, "answer": f"```python\ndef f(a, b):\n    return {expression}\n```"}
    tests = [f"assert f({a}, {b}) == {eval(expression, {'a': a, 'b': b})}" for a, b in INPUTS]
    return {"question": question, "solution": "\n".join(tests)}


def _confused(rng: random.Random, operator: str) -> str:
    others = [name for name in OPERATORS if name != operator]
    return rng.choice(others) if rng.random() < CONFUSED_SHARE else operator


def math_row(rng: random.Random, is_demonstration: bool) -> Row:
    """A sum of two fractions with its reduced value, or with an answer that may be wrong."""
    x, y, denominator = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 9)
    question = f"What is {x}/{denominator} + {y}/{denominator}?"
    if is_demonstration:
        below = 2 * denominator if rng.random() < ADDED_SHARE else denominator
        return {"question": question, "answer": f"\\boxed{{\\frac{{{x + y}}}{{{below}}}}}"}
    value = Fraction(x + y, denominator)
    return {"question": question, "solution": f"\\frac{{{value.numerator}}}{{{value.denominator}}}"}


def _write(file: Path, rows: Sequence[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_task(folder: Path, make_row: MakeRow, *, num_train: int, num_val: int, num_demonstrations: int) -> None:
    """Writes the three files of a task. A question of the validation data occurs in no other file."""
    rng = random.Random(1)
    val = {row["question"]: row for row in (make_row(rng, False) for _ in range(num_val))}
    _write(folder / "val.jsonl", list(val.values()))
    for name, count, is_demonstration in (("train", num_train, False), ("demonstrations", num_demonstrations, True)):
        rows = (make_row(rng, is_demonstration) for _ in range(count))
        _write(folder / f"{name}.jsonl", [row for row in rows if row["question"] not in val])


def main(folder: Path, *, num_train: int = 4096, num_val: int = 128, num_demonstrations: int = 19_200) -> None:
    """Writes the model with its tokenizer, and the tasks `code` and `math`, to `folder`."""
    rl_data.build_tiny_model(folder / "model", seed=1)
    build_tokenizer().save_pretrained(folder / "model")
    for name, make_row in (("code", code_row), ("math", math_row)):
        write_task(folder / name, make_row, num_train=num_train, num_val=num_val, num_demonstrations=num_demonstrations)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
