"""Trains on JSON lines with columns of their own, one of which a reward function reads. On two CPU cores:

    python packages/rl_data/examples/own_columns.py example
    PYTHONPATH=packages/rl_data/examples plinth grpo preset=demo model.path=example/model \\
        data.train=example/train.jsonl data.val=example/val.jsonl warm_start.files=example/demonstrations.jsonl \\
        data.columns.prompt=problem data.columns.ground_truth=solution reward.function=own_columns:near

`near` gives a wrong sum a part of the score if it is close, by the tolerance in the column `tolerance` of its row.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rl_data
from rl_data.files.opening import open_table


def near(response_text: str, prompt: rl_data.Prompt) -> float:
    """1 for the right number after "#### ", 0.5 for one within the row's tolerance, else 0."""
    answer = response_text.rpartition("#### ")[2].strip()
    if not answer.isascii() or not answer.isdigit():
        return 0.0
    distance = abs(int(answer) - int(prompt.ground_truth))
    return 1.0 if distance == 0 else 0.5 if distance <= prompt.extra["tolerance"] else 0.0


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path, *, num_train: int = 4096, num_demonstrations: int = 19_200) -> None:
    """Writes the built-in model and task to `folder`, the task as JSON lines."""
    rl_data.build_tiny_model(folder / "model", seed=1)
    task = rl_data.write_task(folder, num_train=num_train, num_demonstrations=num_demonstrations, seed=1)
    for file in (task.train, task.val):
        rows = [row for _, row in open_table(file).rows()]
        solutions = [int(row["answer"].rpartition("#### ")[2]) for row in rows]
        _write(
            file.with_suffix(".jsonl"),
            (
                {"problem": row["question"], "solution": solution, "tolerance": 1 + solution // 50}
                for row, solution in zip(rows, solutions, strict=True)
            ),
        )
    _write(folder / "demonstrations.jsonl", (row for _, row in open_table(task.demonstrations).rows()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
