"""Hosts without a shared folder: whoever dies between two requests, the newest checkpoint is whole."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_mortal import Died, Fate, MortalStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import (
    AsyncSaver,
    Checkpoint,
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointManager,
    HostCheckpoints,
    RemoteCheckpoints,
    Retention,
    SaverRanks,
    UploadError,
    load_state_dict,
    rank_file,
)
from ckpt.savers.coordination import COORDINATION_PREFIX
from ckpt.store.remote import PART_PREFIX
from plinth_testing import raises

NUM_RANKS = 2


def process_name(rank: int | None) -> str:
    return "driver" if rank is None else f"rank {rank}"


def weights(step: int, rank: int) -> torch.Tensor:
    return torch.full((50,), 100.0 * step + rank)


class Job:
    """A driver without a rank and ranks on hosts of their own, each a thread; `fate` decides who dies."""

    def __init__(self, folder: Path, url: str, run_id: str, *, fate: Fate | None = None, keep_last: int = 1) -> None:
        self._folder, self._url, self._run_id, self._fate = folder, url, run_id, fate
        self._keep_last, self._metrics = keep_last, {"run": float(len(run_id))}
        self._savers: list[AsyncSaver] = []

    def run(self, steps: list[int], *, overwrite: bool = False) -> list[int]:
        """The steps whose save has succeeded in the driver."""
        processes: list[int | None] = [None, *range(NUM_RANKS)]
        self._savers = [self._saver(rank) for rank in processes]
        with ThreadPoolExecutor(len(processes)) as pool:
            done = [pool.submit(self._train, rank, saver, steps, overwrite) for rank, saver in self._each(processes)]
            return [each.result(timeout=120) for each in done][0]  # noqa: RUF015 - all are to raise

    def _each(self, processes: list[int | None]) -> list[tuple[int | None, AsyncSaver]]:
        return list(zip(processes, self._savers, strict=True))

    def _saver(self, rank: int | None) -> AsyncSaver:
        remote = RemoteCheckpoints(self._url)
        if self._fate is not None:
            remote.fs = MortalStorage(remote.fs, process_name(rank), self._fate)
        store = HostCheckpoints(
            self._folder / process_name(rank), remote, retention=Retention(keep_last=self._keep_last), retry_s=0
        )
        store.longest_poll_s = 0.01
        ranks = SaverRanks(num_ranks=NUM_RANKS, rank=rank, run_id=self._run_id, publisher=None)
        return AsyncSaver(store, ranks=ranks, timeout_s=60)

    def _train(self, rank: int | None, saver: AsyncSaver, steps: list[int], overwrite: bool) -> list[int]:
        saved: list[int] = []
        try:
            with saver:
                for step in steps:
                    trees = {} if rank is None else {"model": {"w": weights(step, rank)}}
                    saver.save(step, trees, state={"step": step}, metrics=self._metrics, overwrite=overwrite)
                    actual = saver.wait()
                    assert actual is not None
                    assert actual.state == {"step": step}
                    saved.append(step)
        except BaseException as error:
            if self._fate is None or not isinstance(error, Exception | Died):
                raise
            for other in self._savers:  # as the launcher ends the ranks
                assert other._coordinator is not None
                other._coordinator.cancel()
        return saved


def check_newest(url: str, folder: Path, *, parts: Path | None = None) -> tuple[int, int] | None:
    """The newest step, downloaded whole to a new host, and the bytes downloaded; None if there is none."""
    remote = RemoteCheckpoints(url)
    if not (steps := remote.steps()):
        return None
    sizes: list[int] = []
    checkpoint = remote.download(steps[-1], folder, overwrite=True, parts=parts, on_file=sizes.append)
    check(checkpoint)
    return checkpoint.step, sum(sizes)


def check(checkpoint: Checkpoint) -> None:
    assert checkpoint.state == {"step": checkpoint.step}
    assert CheckpointManager(checkpoint.path.parent).verify(checkpoint.step) == ()
    for rank in range(NUM_RANKS):
        actual = load_state_dict(checkpoint.path / rank_file("model", rank))["w"]
        assert torch.equal(actual, weights(checkpoint.step, rank))


VICTIMS = st.frozensets(st.sampled_from(["driver", "rank 0", "rank 1"]), min_size=1)


@settings(deadline=None, derandomize=True, max_examples=10)
@given(instant=st.integers(1, 160), victims=VICTIMS, after=st.booleans())
def test_the_newest_checkpoint_is_whole_whoever_dies_at_any_request(
    instant: int, victims: frozenset[str], after: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), f"file://{name}/storage/run"
        Job(folder / "hosts", url, "first").run([1])
        fate = Fate(instant, victims, after=after)
        saved = Job(folder / "hosts", url, "second", fate=fate).run([2, 3])
        assert fate.happened.is_set() or saved == [2, 3]
        actual = check_newest(url, folder / "new host")
        assert actual is not None
        assert actual[0] >= max([1, *saved]), "what the run counts on is there"
        # The job starts again on other hosts, from the newest checkpoint, and takes the lost steps again.
        Job(folder / "other hosts", url, "third").run([actual[0] + 1, actual[0] + 2], overwrite=True)
        newest = check_newest(url, folder / "new host")
        assert newest is not None
        assert newest[0] == actual[0] + 2
        left = RemoteCheckpoints(url).names()
        assert [entry.partition(".")[0] for entry in left] == [f"step_{newest[0]:08d}"], "no litter"


def test_hosts_meet_in_any_storage(tmp_path: Path, url: str) -> None:
    (tmp_path / "hosts").mkdir()
    assert Job(tmp_path / "hosts", url, "first").run([1, 2]) == [1, 2]
    dead = RemoteCheckpoints(url)
    dead.put_text(f"{COORDINATION_PREFIX}dead/00000001.open", "{}")
    assert dead.read_text(f"{COORDINATION_PREFIX}dead/00000001.open") == "{}"
    assert dead.read_text(f"{COORDINATION_PREFIX}dead/00000002.open") is None
    assert dead.names(f"{COORDINATION_PREFIX}dead") == ["00000001.open"]
    assert Job(tmp_path / "hosts", url, "second").run([3]) == [3]
    actual = check_newest(url, tmp_path / "new host")
    assert actual is not None
    assert actual[0] == 3
    assert [name.partition(".")[0] for name in RemoteCheckpoints(url).names()] == ["step_00000003"]


def test_a_host_downloads_only_the_files_of_the_others(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage/run"
    Job(tmp_path / "hosts", url, "run").run([1, 2])
    own = tmp_path / "hosts" / "rank 0"
    (part,) = own.glob(f"{PART_PREFIX}*")
    alone, whole = check_newest(url, tmp_path / "a"), check_newest(url, tmp_path / "b", parts=own)
    assert alone is not None
    assert whole is not None
    size = (part / rank_file("model", 0)).stat().st_size
    assert alone[1] - whole[1] == size
    assert check_newest(url, tmp_path / "a") == (2, 0), "it is there"
    (part / rank_file("model", 0)).write_bytes(b"x" * size)
    assert check_newest(url, tmp_path / "c", parts=own) == alone, "a file that differs is downloaded"


def test_a_downloaded_checkpoint_is_replaced_by_the_one_that_was_published_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage/run"
    Job(tmp_path / "hosts", url, "first").run([1, 2])
    assert check_newest(url, tmp_path / "here") is not None
    with pytest.raises(CheckpointExistsError):
        Job(tmp_path / "hosts", url, "second").run([2])
    Job(tmp_path / "hosts", url, "the-third").run([2], overwrite=True)
    again = check_newest(url, tmp_path / "here")
    assert again is not None
    assert again[1] > 0
    (file,) = (tmp_path / "storage" / "run").glob("*/model.rank00001.safetensors")
    file.write_bytes(b"")
    with raises(CheckpointDamagedError, step=2, files=("model.rank00001.safetensors",)):
        check_newest(url, tmp_path / "there")


def test_retention_holds_below_the_url_and_a_host_keeps_its_newest_part(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage/run"
    Job(tmp_path / "hosts", url, "run", keep_last=2).run([1, 2, 3])
    assert RemoteCheckpoints(url).steps() == [2, 3]
    for host in (tmp_path / "hosts").iterdir():
        assert [path.name.rpartition(".")[0] for path in host.iterdir()] == [f"{PART_PREFIX}step_00000003"]


def test_a_storage_that_fails_for_a_while_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteCheckpoints(f"file://{tmp_path}/storage/run")
    said: list[str] = []
    store = HostCheckpoints(tmp_path / "host", remote, report=said.append)
    put, failures = remote.fs.put_file, iter(range(3))

    def fails_three_times(*arguments: Any) -> None:
        if next(failures, None) is not None:
            raise ConnectionError("no route")
        put(*arguments)

    monkeypatch.setattr(remote.fs, "put_file", fails_three_times)
    with AsyncSaver(store) as saver:
        saver.save(1, {"model": {"w": weights(1, 0)}}, state={"step": 1})
    assert remote.steps() == [1]
    assert len(said) == 3
    assert "ConnectionError: no route; next try in 0 s" in said[0]
    (upload,) = store.take_finished()
    assert (upload.name, store.take_finished()) == ("step 1", [])


def test_a_storage_that_stays_away_ends_the_save_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteCheckpoints(f"file://{tmp_path}/storage/run")
    store = HostCheckpoints(tmp_path / "host", remote, report=lambda _: None, retry_s=0.02)

    def fail(*_: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(remote.fs, "mv", fail)
    saver = AsyncSaver(store)
    saver.save(1, {"model": {"w": weights(1, 0)}})
    with pytest.raises(UploadError):
        saver.wait()
    assert remote.names() == []
    assert list((tmp_path / "host").iterdir()) == []
