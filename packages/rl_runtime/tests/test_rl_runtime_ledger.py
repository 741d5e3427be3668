"""The ledger of samples: outcomes, rewinding, resumed runs, and files cut by a kill."""

from pathlib import Path
from typing import Any

import pytest
from rl_runtime_samples import group, sample

from ckpt import Checkpoint
from rl_runtime.rollout.groups import Collected
from rl_runtime.training.ledger import FILE_NAME, SampleLedger, SampleRow, read_samples
from rollout_vllm import Group


def whole(key: str, num_samples: int = 2, **failed: Any) -> Group:
    return group(
        [sample(2, prompt_id=key, sample_index=index, spans=[(3, 2)]) for index in range(num_samples)], **failed
    )


def collected(*ended: Group, trained: tuple[str, ...]) -> Collected:
    samples = tuple(one for ended_group in ended for one in ended_group.samples if one.prompt_id in trained)
    return Collected(samples=samples, num_failed=0, ended=ended)


def test_every_sample_of_a_group_that_ended_has_an_outcome(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path)
    mixed = sample(2, prompt_id="1/0:a", sample_index=0, spans=[(2, 1), (3, 1)])
    ledger.add(4, collected(group([mixed], num_failed=1), whole("1/1:b"), trained=("1/0:a",)))
    assert read_samples(tmp_path) == [
        SampleRow(4, "1/0:a", 0, "trained", "2", "3"),
        SampleRow(4, "1/0:a", 1, "failed", "", ""),
        SampleRow(4, "1/1:b", 0, "left_out", "3", "3"),
        SampleRow(4, "1/1:b", 1, "left_out", "3", "3"),
    ]


def test_a_run_that_continues_from_a_checkpoint_drops_later_steps(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path)
    for step in (1, 2, 3):
        ledger.add(step, collected(whole(f"{step}/0:a"), trained=(f"{step}/0:a",)))
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("4\t4/0:a\t0\ttrai")  # killed while it wrote
    again = SampleLedger(tmp_path)  # new ranks in the same folder
    again.rewind(2)
    again.add(3, collected(whole("3/1:b"), trained=("3/1:b",)))
    assert [(row.step, row.group) for row in read_samples(tmp_path)][::2] == [(1, "1/0:a"), (2, "2/0:a"), (3, "3/1:b")]


@pytest.mark.parametrize("has_before", [True, False])
def test_a_resumed_run_begins_with_the_lines_of_the_run_before(tmp_path: Path, has_before: bool) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    if has_before:
        ledger = SampleLedger(before)
        for step in (1, 2):
            ledger.add(step, collected(whole(f"{step}/0:a"), trained=()))
    SampleLedger(after, Checkpoint(path=before / "checkpoints" / "step_1", step=1, state={}))
    assert {row.step for row in read_samples(after)} == ({1} if has_before else set())
