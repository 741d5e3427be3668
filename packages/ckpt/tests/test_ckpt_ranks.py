"""Several ranks save one checkpoint in the background; here each rank is a thread with its own saver."""

import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import (
    AsyncSaver,
    Capture,
    CheckpointError,
    CheckpointManager,
    CheckpointSpaceError,
    CheckpointStateError,
    CheckpointUsageError,
    FileEntry,
    SaverRanks,
    load_state_dict,
    rank_file,
)
from ckpt.savers.coordination import COORDINATION_PREFIX, SaveCoordinator
from ckpt.store.shared_folder import SharedFolder
from plinth_testing import raises


def coordination_folders(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(COORDINATION_PREFIX)]


class Failing(Capture):
    """A capture whose `write` fails."""

    def __init__(self, error: Exception | None, delay_s: float = 0.0) -> None:
        self._error, self._delay_s = error, delay_s

    @property
    def num_bytes(self) -> int:
        return 0

    def take(self) -> None:
        return

    def write(self, folder: Path, name: str) -> Mapping[str, FileEntry]:
        time.sleep(self._delay_s)
        if self._error is not None:
            raise self._error
        return {}


@settings(deadline=None, derandomize=True, max_examples=12)
@given(num_ranks=st.integers(1, 4), has_driver=st.booleans(), num_saves=st.integers(1, 3), seed=st.integers(0, 1000))
def test_any_number_of_ranks(num_ranks: int, has_driver: bool, num_saves: int, seed: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / f"{COORDINATION_PREFIX}of-a-dead-run").mkdir()
        publisher = None if has_driver else num_ranks - 1

        def run(rank: int | None) -> None:
            dice = random.Random(f"{seed} {rank}")
            ranks = SaverRanks(num_ranks=num_ranks, rank=rank, run_id="run-1", publisher=publisher)
            weights = torch.zeros(1000)
            with AsyncSaver(CheckpointManager(root, keep_last=2), ranks=ranks, timeout_s=60) as saver:
                for step in range(1, num_saves + 1):
                    time.sleep(dice.uniform(0, 0.02))
                    weights.fill_(step + 100 * (rank or 0))
                    trees = {} if rank is None else {"model": {"w": weights}, "rng": {"rank": rank}}
                    saver.save(step, trees, state={"step": step}, metrics={"score": step})
                    weights.fill_(-1)
                actual = saver.wait()
                assert actual is not None
                assert (actual.step, actual.state) == (num_saves, {"step": num_saves})

        processes: list[int | None] = [*range(num_ranks), *([None] if has_driver else [])]
        with ThreadPoolExecutor(len(processes)) as pool:
            for done in [pool.submit(run, rank) for rank in processes]:
                done.result(timeout=120)
        manager = CheckpointManager(root)
        assert manager.steps() == list(range(max(1, num_saves - 1), num_saves + 1))
        for step in manager.steps():
            path = manager.load(step).path
            for rank in range(num_ranks):
                file = rank_file("model", rank) if num_ranks > 1 else "model.safetensors"
                assert torch.equal(load_state_dict(path / file)["w"], torch.full((1000,), step + 100.0 * rank))
            assert manager.manifest(step).metrics == {"score": step}
            assert len(manager.manifest(step).files) == 2 * num_ranks + 1
        # A single process leaves the files alone; otherwise the publisher and the last process to close delete them.
        assert coordination_folders(root) == (
            [f"{COORDINATION_PREFIX}of-a-dead-run"] if num_ranks == 1 and not has_driver else []
        )


class FailingToCopy(Failing):
    """A capture whose `copy` fails."""

    def copy(self) -> None:
        self.write(Path(), "")


@pytest.mark.parametrize("kind", [Failing, FailingToCopy])
@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_a_failure_anywhere_is_raised_everywhere_by_the_same_call(
    tmp_path: Path, failing_rank: int, kind: type[Failing]
) -> None:
    raised: dict[int, Exception] = {}

    def run(rank: int) -> None:
        ranks = SaverRanks(num_ranks=3, rank=rank, run_id="run")
        with AsyncSaver(CheckpointManager(tmp_path), ranks=ranks, timeout_s=60) as saver:
            saver.save(1, {"model": {"w": torch.ones(3)}})
            error = CheckpointSpaceError("the disk is full") if rank == failing_rank else None
            broken = kind(error, delay_s=0.05 * rank)
            saver.save(2, {"broken": broken, "model": {"w": torch.ones(3)}}, copy_in_background=True)
            saver.wait_copied()
            with pytest.raises(CheckpointSpaceError) as caught:
                saver.save(3, {"model": {"w": torch.ones(3)}})
            raised[rank] = caught.value
            saver.save(4, {"model": {"w": torch.ones(3)}})

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(run, rank) for rank in range(3)]:
            done.result(timeout=120)
    assert sorted(raised) == [0, 1, 2]
    assert CheckpointManager(tmp_path).steps() == [1, 4]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".partial", ".trash"))]


def test_a_state_that_cannot_be_stored_stops_the_others_too(tmp_path: Path) -> None:
    savers = [
        AsyncSaver(CheckpointManager(tmp_path), ranks=SaverRanks(num_ranks=2, rank=rank, run_id="run"), timeout_s=60)
        for rank in range(2)
    ]
    savers[0].save(1, {"model": {"w": torch.ones(3)}})
    with pytest.raises(CheckpointStateError):
        savers[1].save(1, {"model": {"w": object()}})
    with raises(CheckpointStateError, field="w"):
        savers[0].wait()
    assert CheckpointManager(tmp_path).steps() == []


def test_a_rank_that_never_writes_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    saver = AsyncSaver(CheckpointManager(tmp_path), ranks=SaverRanks(num_ranks=2, rank=0, run_id="run"), timeout_s=0.2)
    saver.save(1, {"model": {"w": torch.ones(3)}})
    with pytest.raises(CheckpointError, match="rank 1"):
        saver.wait()
    late = AsyncSaver(CheckpointManager(tmp_path), ranks=SaverRanks(num_ranks=2, rank=1, run_id="run"), timeout_s=5)
    late.save(1, {"model": {"w": torch.ones(3)}})
    with pytest.raises(CheckpointError):
        late.wait()
    assert CheckpointManager(tmp_path).steps() == []
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".partial")]


def test_a_failing_process_does_not_wait_for_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    saver = AsyncSaver(CheckpointManager(tmp_path), ranks=SaverRanks(num_ranks=2, rank=1, run_id="run"))
    with pytest.raises(RuntimeError, match="training failed") as caught, saver:  # noqa: PT012 - the context is tested
        saver.save(1, {"model": {"w": torch.ones(3)}})
        raise RuntimeError("training failed")
    assert "stopped waiting" in str(caught.value.__notes__)
    assert time.monotonic() - started < 30
    assert threading.active_count() < 20


def test_wrong_use(tmp_path: Path) -> None:
    good: dict[str, Any] = {"num_ranks": 2, "rank": 0, "run_id": "a"}
    refused: tuple[dict[str, Any], ...] = (
        {"num_ranks": 0},
        {"rank": 2},
        {"publisher": -1},
        {"run_id": "a/b"},
        {"run_id": ""},
    )
    for options in refused:
        ((field, value),) = options.items()
        with raises(CheckpointUsageError, field=field, value=value):
            SaverRanks(**{**good, **options})
    with raises(CheckpointUsageError, field="publisher", value=0):
        SaverRanks(**{**good, "rank": None})
    driver = AsyncSaver(
        CheckpointManager(tmp_path), ranks=SaverRanks(num_ranks=1, rank=None, run_id="a", publisher=None), timeout_s=0.1
    )
    with raises(CheckpointUsageError, field="state_dicts", value="model"):
        driver.save(1, {"model": {}})


def test_files_of_earlier_saves_are_deleted_when_all_have_begun_the_next(tmp_path: Path) -> None:
    first, second = (
        SaveCoordinator(
            SharedFolder(CheckpointManager(tmp_path)), SaverRanks(num_ranks=2, rank=rank, run_id="run"), timeout_s=1
        )
        for rank in range(2)
    )
    for save in (1, 2, 3):
        first.open(save, "folder")
        assert second.await_open(save) == "folder"
        second.report(save, {"x": FileEntry(num_bytes=save, checksum="00")})
        assert first.collect(save) == {"x": FileEntry(num_bytes=save, checksum="00")}
        first.conclude(save, ValueError("not ours") if save == 2 else None)
        if save == 2:
            with pytest.raises(CheckpointError, match="ValueError: not ours"):
                second.await_outcome(save)
        else:
            second.await_outcome(save)
    assert {path.name.partition(".")[0] for path in (tmp_path / f"{COORDINATION_PREFIX}run").iterdir()} == {"00000003"}
    first.close()
    second.close()
    assert coordination_folders(tmp_path) == []
