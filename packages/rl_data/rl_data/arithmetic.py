"""The built-in tasks: addition word problems, written as GSM8K-format parquet.

A question adds two numbers of 1..50. The answer shows its working in columns, ones first, the carry as the third
addend of the tens, and ends in `#### n`:

    Tom has 27 apples and buys 45 more. How many apples does Tom have now?
    7 + 5 = 12
    2 + 4 + 1 = 7
    #### 72

The split is by unordered operand pairs: a pair in the held-out file occurs nowhere else, in neither order, so
held-out accuracy cannot come from memory.

Demonstrations for the warm start come in two styles, as unchecked web data would: some show right working, the others
jump straight to `#### n` and are mostly wrong. A model trained on them answers in both styles; reinforcement
learning then finds that showing the working pays.

The calculator task asks the same questions with operands of 1..99. Its demonstrations either call a calculator, whose
result is given to the model and not written by it, or jump:

    <call> 27 + 45 <result>         written by the model
    72                              given to it
    #### 72                         written by the model
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["CALL", "RESULT", "VOCABULARY_WORDS", "ArithmeticTask", "TaskKind", "write_task"]

TaskKind = Literal["arithmetic", "calculator"]
#: Operands are 1 to this.
MAX_OPERAND: dict[TaskKind, int] = {"arithmetic": 50, "calculator": 99}
#: Share of operand pairs kept for the held-out file.
HELD_OUT_SHARE = 0.2
#: Share of demonstrations that show their working or call the calculator.
WORKING_SHARE = 0.4
#: Share of the other demonstrations whose number is wrong.
WRONG_SHARE = 0.8

NAMES = ("Tom", "Mia", "Ben", "Ana", "Sam", "Lea")
ITEMS = ("apples", "books", "pens", "coins", "eggs", "cards")
TEMPLATES = (
    "{a} has {x} {item} and buys {y} more. How many {item} does {a} have now?",
    "{a} has {x} {item}. {b} gives {a} {y} more. How many {item} does {a} have now?",
    "{a} has {x} {item} and {b} has {y} {item}. How many {item} do they have in all?",
    "There are {x} {item} in a box and {y} {item} in a bag. How many {item} are there in all?",
)
_PUNCTUATION = ("+", "=", "####", ".", "?")
#: A call to the calculator is `CALL x + y RESULT`.
CALL, RESULT = "<call>", "<result>"


def _template_words() -> tuple[str, ...]:
    words: dict[str, None] = {}
    for template in TEMPLATES:
        spaced = template.replace(".", " ").replace("?", " ")
        words.update(dict.fromkeys(word for word in spaced.split() if not word.startswith("{")))
    return tuple(words)


#: Every word and mark that the task's texts use, digits and line break excepted; fixed order.
VOCABULARY_WORDS: tuple[str, ...] = (*_PUNCTUATION, *NAMES, *ITEMS, *_template_words(), CALL, RESULT)


@dataclass(frozen=True)
class ArithmeticTask:
    """The three parquet files of the task, each with the columns `question` and `answer`.

    Answers are text; a demonstration of the calculator task is a list of texts, by turns written by the model and given
    to it.
    """

    train: Path
    val: Path
    demonstrations: Path


def working(x: int, y: int) -> str:
    """The right answer of x + y with its working in columns, three lines."""
    ones = x % 10 + y % 10
    carry = ones // 10
    tens = x // 10 + y // 10 + carry
    return f"{x % 10} + {y % 10} = {ones}\n{x // 10} + {y // 10} + {carry} = {tens}\n#### {x + y}"


def tool_call(x: int, y: int) -> list[str]:
    """The right answer of x + y by way of the calculator: what the model writes, is given, and writes."""
    return [f"{CALL} {x} + {y} {RESULT}", f"{x + y}\n", f"#### {x + y}"]


def _question(rng: random.Random, x: int, y: int) -> str:
    a, b = rng.sample(NAMES, 2)
    return rng.choice(TEMPLATES).format(a=a, b=b, item=rng.choice(ITEMS), x=x, y=y)


def _jump(rng: random.Random, x: int, y: int, max_operand: int) -> str:
    right = x + y
    if rng.random() >= WRONG_SHARE:
        return f"#### {right}"
    return f"#### {rng.choice([n for n in range(2, 2 * max_operand + 1) if n != right])}"


def _problems(rng: random.Random, pairs: Sequence[tuple[int, int]], count: int) -> list[tuple[str, int, int]]:
    """`count` problems (question, x, y), pairs used equally often, no question twice while others remain."""
    problems: list[tuple[str, int, int]] = []
    seen: set[str] = set()
    while len(problems) < count:
        for pair in rng.sample(pairs, min(len(pairs), count - len(problems))):
            x, y = pair if rng.random() < 0.5 else (pair[1], pair[0])
            question = _question(rng, x, y)
            for _ in range(20):
                if question not in seen:
                    break
                question = _question(rng, x, y)
            seen.add(question)
            problems.append((question, x, y))
    return problems


def _write(path: Path, rows: Sequence[tuple[str, str | list[str]]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"question": [row[0] for row in rows], "answer": [row[1] for row in rows]})
    pq.write_table(table, path)
    return path


def write_task(
    folder: str | Path,
    *,
    kind: TaskKind = "arithmetic",
    num_train: int = 4096,
    num_val: int = 256,
    num_demonstrations: int = 4096,
    seed: int = 0,
) -> ArithmeticTask:
    """Write train.parquet, val.parquet and demonstrations.parquet into `folder` (made if absent).

    The same arguments give the same rows. The seed also chooses which operand pairs are held out.
    Raises ValueError for a count below 1.
    """
    for name, count in (("num_train", num_train), ("num_val", num_val), ("num_demonstrations", num_demonstrations)):
        if count < 1:
            raise ValueError(f"{name}={count!r}: must be at least 1")
    rng = random.Random(seed)
    top = MAX_OPERAND[kind]
    pairs = [(x, y) for x in range(1, top + 1) for y in range(x, top + 1)]
    rng.shuffle(pairs)
    num_held_out = int(len(pairs) * HELD_OUT_SHARE)
    held_out, known = pairs[:num_held_out], pairs[num_held_out:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train = [(question, _answer(kind, x, y)) for question, x, y in _problems(rng, known, num_train)]
    val = [(question, _answer(kind, x, y)) for question, x, y in _problems(rng, held_out, num_val)]
    demonstrations = [
        (question, _demonstration(kind, rng, x, y)) for question, x, y in _problems(rng, known, num_demonstrations)
    ]
    return ArithmeticTask(
        train=_write(folder / "train.parquet", train),
        val=_write(folder / "val.parquet", val),
        demonstrations=_write(folder / "demonstrations.parquet", demonstrations),
    )


def _demonstration(kind: TaskKind, rng: random.Random, x: int, y: int) -> str | list[str]:
    """A response to imitate: text, or its parts where a tool may have written some."""
    shows = rng.random() < WORKING_SHARE
    if kind == "arithmetic":
        return working(x, y) if shows else _jump(rng, x, y, MAX_OPERAND[kind])
    return tool_call(x, y) if shows else [_jump(rng, x, y, MAX_OPERAND[kind])]


def _answer(kind: TaskKind, x: int, y: int) -> str:
    """The answer column of a problem; rewards read its last line only."""
    return working(x, y) if kind == "arithmetic" else tool_call(x, y)[-1]
