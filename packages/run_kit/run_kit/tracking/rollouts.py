"""`rollouts/step_000001.jsonl`: a sample of each step's rollouts, one JSON object per line."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import TrackingError
from .metrics_table import atomic_write, naming_file

REQUIRED = ("prompt", "response", "reward")


def write_rollouts(folder: Path, step: int, records: Sequence[Mapping[str, Any]], *, count: int) -> Path:
    """Write a sample of a step's rollouts.

    Args:
        folder: the run's `rollouts/` folder; created if missing.
        records: mappings with at least `prompt` (text), `response` (text) and `reward` (number); further keys that
            JSON can hold are kept.
        count: how many to write at most, chosen by the step number only.

    Raises:
        TrackingError: a record without one of the three keys, or a value that JSON cannot hold.
    """
    for index, record in enumerate(records):
        if missing := [key for key in REQUIRED if key not in record]:
            problem = f"record {index} of step {step} lacks it"
            raise TrackingError(problem, field=missing[0], allowed=f"records with {', '.join(REQUIRED)}")
    chosen = sorted(random.Random(step).sample(range(len(records)), min(count, len(records))))
    path = folder / f"step_{step:06d}.jsonl"
    with naming_file(path):
        folder.mkdir(exist_ok=True)  # without parents: a run folder that was removed does not come back
    try:
        lines = [json.dumps({"step": step, **records[index]}, ensure_ascii=False, default=_plain) for index in chosen]
    except TypeError as error:
        raise TrackingError(f"its rollouts: {error}", field="step", value=step) from None
    atomic_write(path, "".join(f"{line}\n" for line in lines))
    return path


def read_rollouts(folder: Path) -> list[dict[str, Any]]:
    """All written rollouts of a run, in the order of the steps; empty if there are none.

    Raises:
        TrackingError: a line that is no record; names file and line.
    """
    records: list[dict[str, Any]] = []
    for path in sorted(folder.glob("step_*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TrackingError(f"not JSON ({error})", field=f"{path}, line {number}") from None
            if not _is_record(record):
                needs = "a number `step`, texts `prompt` and `response` and a number `reward`"
                raise TrackingError(f"not a rollout, which has {needs}", field=f"{path}, line {number}")
            records.append(record)
    return records


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    texts = isinstance(value.get("prompt"), str) and isinstance(value.get("response"), str)
    return texts and isinstance(value.get("step"), int) and isinstance(value.get("reward"), (int, float))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
