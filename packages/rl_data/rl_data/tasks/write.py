"""Writes the built-in tasks: parquet files with problems and with demonstrations of how to solve them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..errors import DataConfigError
from . import arithmetic, stones

TaskKind = Literal["arithmetic", "calculator", "stones"]


@dataclass(frozen=True)
class TaskFiles:
    """The parquet files of a task.

    Problems have the column `question`, and `answer` or what the environment of the task reads. Demonstrations have
    `question` and `answer`: text, or a list of texts that alternate between the model and a tool or environment.
    """

    train: Path
    val: Path
    demonstrations: Path
    pairs: Path | None = None
    """Pairs of responses for preference training (`question`, `chosen`, `rejected`), if there are any."""
    val_pairs: Path | None = None
    """Pairs whose operands are those of the validation problems, if there are any."""


def write_task(
    folder: str | Path,
    *,
    kind: TaskKind = "arithmetic",
    num_train: int = 4096,
    num_val: int = 256,
    num_demonstrations: int = 4096,
    num_pairs: int = 0,
    num_val_pairs: int = 0,
    slip_share: float = 0.0,
    seed: int = 0,
) -> TaskFiles:
    """Write train.parquet, val.parquet and demonstrations.parquet to `folder`, which is created if necessary.

    With `num_pairs` and `num_val_pairs`, pairs.parquet and val_pairs.parquet too. The same arguments give the same
    rows. The seed also selects what only the validation data has.

    Args:
        slip_share: share of pairs whose rejected response is the right calculation but for one wrong number and what
            follows from it.

    Raises:
        DataConfigError: a count is below 1, a share is not from 0 to 1, or another task than arithmetic has pairs.
    """
    counts = {"num_train": num_train, "num_val": num_val, "num_demonstrations": num_demonstrations}
    for name, count in counts.items():
        if count < 1:
            raise DataConfigError(field=name, value=count, allowed="at least 1")
    for name, count in (("num_pairs", num_pairs), ("num_val_pairs", num_val_pairs)):
        if count < 0 or (count and kind != "arithmetic"):
            raise DataConfigError(field=name, value=count, allowed="at least 0, and 0 unless kind is arithmetic")
    if not 0 <= slip_share <= 1:
        raise DataConfigError(field="slip_share", value=slip_share, allowed="from 0 to 1")
    rng = random.Random(seed)
    made = stones.rows(rng, **counts) if kind == "stones" else arithmetic.rows(kind, rng, **counts)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("train", "val", "demonstrations")
    files = [write_parquet(folder / f"{name}.parquet", rows) for name, rows in zip(names, made, strict=True)]
    make_pairs = partial(arithmetic.preferences, slip_share=slip_share)
    pairs = {
        name: write_parquet(folder / f"{name}.parquet", make_pairs(random.Random(seed), count, held_out=held_out))
        for name, count, held_out in (("pairs", num_pairs, False), ("val_pairs", num_val_pairs, True))
        if count
    }
    return TaskFiles(*files, **pairs)


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows to a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
