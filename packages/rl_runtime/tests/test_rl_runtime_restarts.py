"""From where a run continues after it has lost its ranks, and when it does not."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt import CheckpointManager
from plinth_testing import raises
from rl_runtime.app.job import Job
from rl_runtime.app.restarts import Restarts
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import RankError, RankLost
from rl_runtime.launch import cluster
from rl_runtime.launch.cluster import Reservation
from rl_runtime.ranks.worker_group import Seat
from run_kit import RunFolder, Tracker, TrackingConfig


class Ranks:
    """A session that counts how often its ranks were started again."""

    def __init__(self) -> None:
        self.num_restarts, self.error = 0, None

    def restart_ranks(self) -> None:
        self.num_restarts += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run with 5 logged steps, of which it has saved 2 and 4."""
    folder = RunFolder.create(tmp_path, "run")
    with (
        Tracker(folder, TrackingConfig(report=False, curves=False, tensorboard=False), num_steps=9) as tracker,
        closing(CheckpointManager(folder.path / "checkpoints")) as manager,
    ):
        for step in range(1, 6):
            tracker.log(step, {"critic/score/mean": 0.1 * step})
            if step in (2, 4):
                (manager.prepare(step) / "weights").write_bytes(bytes(1000))
                manager.publish(step, state={"step": step})
        manager.close()
        yield SimpleNamespace(tracker=tracker, folder=folder.path, checkpoints=folder.path / "checkpoints")


def restarts_of(run: Any, session: Any = None, *, max_restarts: int = 3) -> Restarts:
    config = SimpleNamespace(trainer=TrainerConfig(max_restarts=max_restarts))
    job = Job(
        config=config,  # type: ignore[arg-type]
        session=session or Ranks(),
        tracker=run.tracker,
        inputs=None,  # type: ignore[arg-type]
        folder=run.folder,
        resumed=None,
        memory=None,  # type: ignore[arg-type]
        files=None,  # type: ignore[arg-type]
    )
    return Restarts(job)


def test_it_continues_from_the_newest_checkpoint_up_to_the_limit(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    session = Ranks()
    restarts = restarts_of(run, session, max_restarts=2)
    restarts.start_ranks()
    assert session.num_restarts == 0, "the first ranks run already"
    for number in (1, 2):
        restarts.after(RankLost("rank 1 of 2 died in 'train'"))
        assert restarts.run.resumed is not None
        assert restarts.run.resumed.step == 4
        assert restarts.restart is not None
        assert (restarts.restart.done, restarts.restart.last) == (4, 5)
        said: list[str] = []
        record: Any = SimpleNamespace(rewind=print, info=said.append)
        restarts.restart.begin(record, restarts.run.resumed)
        assert said[0].endswith("; step 5 is taken again")
        restarts.start_ranks()
        restarts.start_ranks()
        assert session.num_restarts == number
        line = f"rank 1 of 2 died in 'train'; new ranks continue after step 4 (restart {number} of 2)"
        assert line in capsys.readouterr().out
    with pytest.raises(RankLost) as lost:
        restarts.after(RankLost("rank 0 of 2 died in 'train'"))
    assert lost.value.__notes__ == ["trainer.max_restarts is 2: no restart is left"]


def test_a_damaged_checkpoint_makes_room_for_a_good_one(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run.checkpoints / "step_00000004" / "weights"
    weights.write_bytes(bytes(999))
    restarts = restarts_of(run)
    restarts.after(RankLost("rank 0 of 2 died in 'save'"))
    assert restarts.run.resumed is not None
    assert restarts.run.resumed.step == 2
    assert "removed the damaged checkpoints 4" in capsys.readouterr().out
    with closing(CheckpointManager(run.checkpoints)) as manager:
        assert manager.steps() == [2]
        manager.prepare(4)


def test_a_run_without_checkpoints_does_not_begin_again(run: Any) -> None:
    for step in (2, 4):
        (run.checkpoints / f"step_{step:08d}" / "weights").unlink()
    with pytest.raises(RankLost) as lost:
        restarts_of(run).after(RankLost("rank 0 of 2 died in 'train'"))
    assert lost.value.__notes__ == ["The run has no checkpoint, so 5 steps are lost: trainer.save_freq=0"]


def test_the_time_of_a_loss_counts_from_the_last_step(run: Any) -> None:
    restarts = restarts_of(run)
    lost_at = []
    for new_steps in (0, 0, 1):
        for step in range(6, 6 + new_steps):
            run.tracker.log(step, {"critic/score/mean": 0.1})
        restarts.after(RankLost("rank 0 of 2 died in 'train'"))
        assert restarts.restart is not None
        lost_at.append(restarts.restart.lost_at)
    assert lost_at[0] == lost_at[1] < lost_at[2]


def test_a_lost_host_is_no_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    reservation = Reservation.__new__(Reservation)
    reservation.ranks = tuple(Seat(node=node, address=f"10.0.0.{node}") for node in ("1", "2"))
    reservation.own_ranks = {"critic": (Seat(node="3", address="10.0.0.3"),)}
    nodes = {"1": True, "2": True, "3": True}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"NodeID": n, "Alive": alive} for n, alive in nodes.items()])
    reservation.check_living()
    nodes["3"] = False
    with raises(RankError, remedy="resume the run on the nodes that are left") as error:
        reservation.check_living()
    assert "10.0.0.3 were lost" in error.value.problem
    assert not isinstance(error.value, RankLost), "it would be tried again"
