"""Checkpoints that a run refuses before it changes an engine, and the state that it restores.

The tests of the apps save and load engines.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt import ArchitectureMismatchError, Checkpoint, CheckpointManager, RemoteCheckpoints, capture_rng
from plinth_testing.errors import raises
from rl_runtime import find_checkpoint
from rl_runtime.app.resume import newest_published
from rl_runtime.app.training_run import check_states_from, resume_command
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import InputError
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.checkpoints import RunCheckpoints
from rl_runtime.training.run_files import (
    WARM_START_MODEL,
    LocalDisks,
    check_checkpoint_url,
    open_run_files,
    published_run,
)

LOCAL_DISKS = {"local_disks": True, "ray_address": "auto", "checkpoint_url": "s3://bucket"}
MODEL = {"w": {"shape": [2, 3], "dtype": "bfloat16"}}


class Loads:
    """A model and a part of the run that record what they load."""

    def __init__(self, model: dict[str, Any]) -> None:
        self.model, self.loaded = model, []

    def describe(self) -> dict[str, Any]:
        return self.model

    def load(self, folder: str) -> None:
        self.loaded.append(folder)

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def save(folder: Path, *names: str) -> Checkpoint:
    manager = CheckpointManager(folder)
    partial = manager.prepare(1)
    for name in names:
        (partial / name).mkdir()
        (partial / name / "shard").write_bytes(b"weights")
    state = {"rng": capture_rng(), "parts": {"sampler": {"at": 3}}}
    return manager.publish(1, state=state, models=dict.fromkeys(names, MODEL))


def checkpoints(roles: dict[str, Loads], sampler: Loads) -> RunCheckpoints:
    return RunCheckpoints(Path(), TrainerConfig(), [], roles=roles, parts={"sampler": sampler}, config="")


def test_other_models_and_other_engines_are_refused_with_nothing_loaded(tmp_path: Path) -> None:
    saved = save(tmp_path, "actor")
    wider = {"w": {"shape": [2, 4], "dtype": "bfloat16"}}
    adapters = MODEL | {"w.lora_A": {"shape": [1, 3], "dtype": "float32"}}
    cases: tuple[tuple[dict[str, Loads], type[Exception], dict[str, Any]], ...] = (
        ({"actor": Loads(wider)}, ArchitectureMismatchError, {"field": "actor", "reshaped": ("w",)}),
        ({"actor": Loads(adapters)}, ArchitectureMismatchError, {"only_here": ("w.lora_A",)}),
        ({"actor": Loads(MODEL), "critic": Loads(MODEL)}, InputError, {}),
    )
    for roles, error, fields in cases:
        sampler = Loads({})
        with raises(error, **fields):
            checkpoints(roles, sampler).load(saved)
        assert [one.loaded for one in (*roles.values(), sampler)] == [[]] * (len(roles) + 1)


def test_the_same_model_in_another_dtype_is_loaded(tmp_path: Path) -> None:
    saved = save(tmp_path, "actor", "critic")
    actor, sampler = Loads({"w": {"shape": [2, 3], "dtype": "float32"}}), Loads({})
    checkpoints({"actor": actor}, sampler).load(saved)
    assert actor.loaded == [str(saved.path / "actor")]
    assert sampler.loaded == [{"at": 3}]


def test_a_model_that_diverges_beside_a_healthy_one_is_not_saved() -> None:
    for skipped in ((0, 2), (2, 0)):
        counts = [SimpleNamespace(skipped=SimpleNamespace(in_a_row=number)) for number in skipped]
        roles: Any = dict(zip(("actor", "critic"), counts, strict=True))
        assert checkpoints(roles, Loads({})).why_not()
    roles["actor"].skipped.in_a_row = 0
    assert not checkpoints(roles, Loads({})).why_not()


def test_a_part_that_an_earlier_version_did_not_save_starts_as_in_a_new_run(tmp_path: Path) -> None:
    saved, sampler, kl = save(tmp_path), Loads({}), Loads({})
    RunCheckpoints(Path(), TrainerConfig(), [], roles={}, parts={"kl": kl, "sampler": sampler}, config="").load(saved)
    assert (kl.loaded, sampler.loaded) == ([], [{"at": 3}])


@pytest.mark.parametrize(("save_freq", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6])])
def test_every_nth_step_is_saved(save_freq: int, steps: list[int]) -> None:
    run = RunCheckpoints(Path(), TrainerConfig(save_freq=save_freq), [], roles={}, parts={}, config="")
    assert [step for step in range(1, 8) if run.is_due(step)] == steps


class RankOfThisProcess:
    """A group of one real `TrainerWorker` without engines; draws a random number after every call.

    Its generator is the driver's, which `seed` sets to another state than the worker's.
    """

    world_size = 1
    nodes = ("a",)

    def __init__(self, seed: int) -> None:
        self.worker, self.seed = TrainerWorker(0, 1, device="cpu", num_threads=1), seed
        self.drawn: dict[str, float] = {}

    def run(self, method: Any, *args: Any) -> None:
        method(self.worker, *args)
        self.drawn[method.__name__] = random.random()
        random.seed(self.seed)


def test_ranks_and_driver_draw_on_where_the_checkpoint_was_saved(tmp_path: Path) -> None:
    trainer = TrainerConfig(save_freq=1, background_save=False)
    before, after = RankOfThisProcess(1), RankOfThisProcess(2)
    with RunCheckpoints(tmp_path, trainer, [before], roles={}, parts={}, config="") as run:  # type: ignore[list-item]
        run.save(1, {})
        drawn_by_driver = random.random()
    resumed = RunCheckpoints(tmp_path, trainer, [after], roles={}, parts={}, config="")  # type: ignore[list-item]
    resumed.load(CheckpointManager(tmp_path).load(1))
    assert random.random() == drawn_by_driver
    assert after.drawn == {"load_rng": before.drawn["save"]}


def run_with(root: Path, name: str, *steps: int) -> CheckpointManager:
    """A run folder with checkpoints of these steps."""
    manager = CheckpointManager(root / name / "checkpoints")
    for step in steps:
        manager.prepare(step)
        manager.publish(step, state={"seed": 1})
    (root / name).mkdir(exist_ok=True)
    return manager


def find(root: Path, **settings: Any) -> tuple[int | None, list[str]]:
    skipped: list[str] = []
    trainer = TrainerConfig(output_dir=str(root), experiment="run", resume="auto", seed=1, **settings)
    checkpoint = find_checkpoint(trainer, skipped.append)
    return checkpoint and checkpoint.step, skipped


def test_resume_says_which_checkpoints_and_runs_it_skips_and_why(tmp_path: Path) -> None:
    assert find(tmp_path) == (None, [])
    old, new = run_with(tmp_path, "run_20260101_000000", 3), run_with(tmp_path, "run_20260102_000000", 1, 2)
    assert find(tmp_path) == (2, [])
    (new.root / "step_00000002" / "state.json").write_text("{")
    step, skipped = find(tmp_path)
    assert step == 1
    assert [line.partition("run_")[0] for line in skipped] == [f"step 2 of {tmp_path}/"]
    assert "state.json: torn" in skipped[0]
    (new.root / "step_00000001" / "manifest.json").unlink()
    step, skipped = find(tmp_path)
    assert step == 3
    assert "step 1 of" in skipped[1]
    assert "manifest.json: missing" in skipped[1]
    assert skipped[2].endswith(f"resumes from the older {old.root.parent}")


def test_a_run_does_not_start_over_while_all_checkpoints_are_damaged_unless_told_to(tmp_path: Path) -> None:
    run = run_with(tmp_path, "run_20260101_000000", 1, 2)
    for step in run.steps():
        (run.root / f"step_{step:08d}" / "manifest.json").write_text("")
    with raises(InputError, field="trainer.resume") as caught:
        find(tmp_path)
    assert "step 2 of" in caught.value.problem
    step, skipped = find(tmp_path, start_over_if_damaged=True)
    assert step is None
    assert skipped[-1].endswith("the run starts at step 1")


def uploaded(storage: Path, manager: CheckpointManager) -> RemoteCheckpoints:
    """The uploads of all checkpoints of a run folder."""
    remote = RemoteCheckpoints(f"file://{storage}/{manager.root.parent.name}")
    for step in manager.steps():
        remote.upload(manager.read(step))
    return remote


def test_resume_takes_the_newest_run_and_step_of_this_host_and_the_storage(tmp_path: Path) -> None:
    here, storage = tmp_path / "here", tmp_path / "storage"
    url = {"checkpoint_url": f"file://{storage}/"}
    assert find(here, **url) == (None, [])
    run = run_with(here, "run_20260101_000000", 3, 5)
    remote = uploaded(storage, run)
    assert find(here, **url) == (5, []), "what is here is not downloaded"

    shutil.rmtree(run.root / "step_00000005")
    step, (line,) = find(here, **url)
    download = here / ".downloads" / "run_20260101_000000" / "checkpoints" / "step_00000005"
    assert (step, line) == (5, f"step 5 was downloaded from {remote.url} to {download}")
    step, (line,) = find(here, **url)
    assert "was downloaded before" in line

    newer = uploaded(storage, run_with(tmp_path / "elsewhere", "run_20260102_000000", 1, 2))
    (tmp_path / "elsewhere" / "run_20260102_000000" / WARM_START_MODEL).mkdir()
    (tmp_path / "elsewhere" / "run_20260102_000000" / WARM_START_MODEL / "weights").write_text("w")
    newer.upload_folder(tmp_path / "elsewhere" / "run_20260102_000000" / WARM_START_MODEL, WARM_START_MODEL)
    step, _ = find(here, **url)
    assert step == 2, "the newer run, although its step is smaller"
    assert (here / ".downloads" / "run_20260102_000000" / WARM_START_MODEL / "weights").read_text() == "w"

    shutil.rmtree(here)
    for name in newer._uploads()[1:]:  # step 2
        (storage / "run_20260102_000000" / name / "state.json").write_text("{")
    step, lines = find(here, **url)
    assert step == 1
    assert lines[0].startswith("step 2 of run_20260102_000000 is skipped: ")
    assert "the download is damaged: state.json: torn" in lines[0]
    assert find(here, resume_from=newer.url)[0] == 1
    assert find(here, resume_from=remote.url)[0] == 5
    with raises(InputError, field="trainer.resume_from", value=f"file://{storage}/nowhere"):
        find(here, resume_from=f"file://{storage}/nowhere")


def test_a_storage_that_does_not_answer_is_no_reason_to_start_over(tmp_path: Path) -> None:
    with raises(InputError, field="trainer.checkpoint_url"):
        find(tmp_path, checkpoint_url="nothing://x")
    (tmp_path / "file").write_text("")
    with raises(InputError, field="trainer.checkpoint_url"):
        check_checkpoint_url(TrainerConfig(checkpoint_url=f"file://{tmp_path}/file/runs"))


def test_the_run_uploads_what_it_publishes_and_reports_seconds_and_bytes(tmp_path: Path) -> None:
    trainer = TrainerConfig(
        save_freq=1, background_save=False, keep_checkpoints=1, checkpoint_url=f"file://{tmp_path}/s"
    )
    run, lines = tmp_path / "run_20260101_000000", []
    with open_run_files(trainer, run, lines.append) as files:
        group: Any = RankOfThisProcess(1)
        folder = run / "checkpoints"
        with RunCheckpoints(folder, trainer, [group], roles={}, parts={}, config="", files=files) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, {})
    metrics = checkpoints.take_metrics()
    assert checkpoints.take_metrics() == {}
    remote = RemoteCheckpoints(f"file://{tmp_path}/s/{run.name}")
    assert remote.steps() == CheckpointManager(folder).steps() == [2]
    assert metrics["checkpoint/upload_bytes"] >= CheckpointManager(folder).manifest(2).num_bytes
    assert 0 < metrics["checkpoint/upload_s"] < 60
    assert lines[-1] == f"checkpoints in {remote.url}: step 2"
    with open_run_files(TrainerConfig(checkpoint_url=f"file://{tmp_path}/unused"), run, lines.append):
        pass
    assert lines[-2:] == [
        "trainer.save_freq is 0: a checkpoint is written and uploaded only when a signal stops the run",
        f"checkpoints in file://{tmp_path}/unused/{run.name}: none",
    ]
    with raises(InputError, field="trainer.experiment"), open_run_files(trainer, run, print):
        pass


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"checkpoint_url": "runs"}, "checkpoint_url"),
        ({"checkpoint_url": "s3://"}, "checkpoint_url"),
        ({"checkpoint_url": "memory://runs"}, "checkpoint_url"),
        ({"checkpoint_url": "file://runs"}, "checkpoint_url"),
        ({"checkpoint_url": "webdav://me:secret@host/runs"}, "checkpoint_url"),
        ({"resume_from": "memory://runs/run", "resume": "auto"}, "resume_from"),
        ({"local_disks": True, "checkpoint_url": "s3://a"}, "ray_address"),
        ({"local_disks": True, "ray_address": "auto"}, "checkpoint_url"),
        (LOCAL_DISKS | {"resume_from": "/run", "resume": "auto"}, "resume_from"),
        (LOCAL_DISKS | {"profile_steps": (1,)}, "profile_steps"),
    ],
)
def test_urls_that_cannot_hold_checkpoints_are_refused(settings: dict[str, Any], field: str) -> None:
    with raises(InputError, field=field) as caught:
        TrainerConfig(**settings)
    assert "secret" not in str(caught.value)


class DisksOfThisProcess(LocalDisks):
    """Calls in this process what runs on the nodes."""

    def _call(self, function: Callable[..., float], nodes: Sequence[str], *args: object) -> list[float]:
        return [function(*args) for _ in nodes]


def local_run(tmp_path: Path, lines: list[str]) -> tuple[TrainerConfig, Path, LocalDisks]:
    """A run folder named after the experiment, on a host with a disk of its own."""
    settings = LOCAL_DISKS | {"checkpoint_url": f"file://{tmp_path}/storage", "output_dir": str(tmp_path / "here")}
    trainer = TrainerConfig(save_freq=1, background_save=False, keep_checkpoints=2, resume="auto", **settings)
    run = tmp_path / "here" / "run_20260101_000000"
    return trainer, run, DisksOfThisProcess(trainer, run, lines.append)


def test_with_local_disks_checkpoints_are_published_in_the_storage_and_fetched_from_it(tmp_path: Path) -> None:
    lines: list[str] = []
    trainer, run, disks = local_run(tmp_path, lines)
    before, after = RankOfThisProcess(1), RankOfThisProcess(2)
    groups: dict[int, Any] = {1: before, 2: after}
    with open_run_files(trainer, run, lines.append) as files:
        assert isinstance(files, LocalDisks)
        with RunCheckpoints(
            run / "checkpoints", trainer, [groups[1]], roles={}, parts={}, config="", files=disks
        ) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(step, {})
        metrics = checkpoints.take_metrics()
    assert metrics["checkpoint/upload_bytes"] > 0
    assert run.stat().st_mode & 0o777 == 0o700
    assert disks.remote.steps() == [2, 3]
    assert lines[-1] == f"checkpoints in {disks.remote.url}: step 2, step 3"
    assert CheckpointManager(run / "checkpoints").steps() == [], "this host has only the files of its ranks"

    checkpoint = find_checkpoint(trainer, lines.append)
    assert checkpoint is not None
    downloaded = tmp_path / "here" / ".downloads" / run.name
    assert checkpoint.path == downloaded / "checkpoints" / "step_00000003"
    assert lines[-1] == f"step 3 was downloaded from {disks.remote.url} to {checkpoint.path}"
    shutil.rmtree(downloaded)  # on another host
    resumed = RunCheckpoints(run, trainer, [groups[2]], roles={}, parts={}, config="", files=disks)
    resumed.load(checkpoint)
    assert after.drawn == {"load_rng": before.drawn["save"]}
    assert "step 3 of" in lines[-1]
    assert "is on all 1 hosts of ranks; downloaded now: 0 GB" in lines[-1]


def test_with_local_disks_a_damaged_upload_makes_room_and_the_url_is_what_resumes(tmp_path: Path) -> None:
    lines: list[str] = []
    trainer, run, disks = local_run(tmp_path, lines)
    remote = uploaded(tmp_path / "storage", run_with(tmp_path / "elsewhere", run.name, 1, 2))
    folder = SimpleNamespace(path=run, config_file=run / "config.yaml")
    assert f"trainer.resume_from={remote.url}" in resume_command(folder, trainer)  # type: ignore[arg-type]
    (tmp_path / "storage" / run.name / remote._uploads()[1] / "state.json").write_text("{")
    remote = published_run(trainer, run.name)
    assert remote is not None
    newest = newest_published(remote, trainer, run.name, lines.append)
    assert newest is not None
    assert newest.step == 1
    assert lines[0].startswith(f"step 2 of {run.name} is skipped: ")
    assert disks.remote.steps() == [1], "step 2 will be saved again"


def test_with_local_disks_a_checkpoint_of_this_host_alone_is_no_reason_to_start_over(tmp_path: Path) -> None:
    trainer, run, _ = local_run(tmp_path, [])
    manager = run_with(tmp_path / "here", run.name, 4)
    with raises(InputError, field="trainer.resume") as caught:
        find_checkpoint(trainer)
    assert "step 4 of" in caught.value.problem
    uploaded(tmp_path / "storage", manager)
    checkpoint = find_checkpoint(trainer)
    assert checkpoint is not None
    assert checkpoint.path.is_relative_to(tmp_path / "here" / ".downloads")


def test_a_folder_of_the_run_is_brought_to_the_other_hosts_and_one_elsewhere_is_not(tmp_path: Path) -> None:
    _, run, disks = local_run(tmp_path, [])
    for folder in (run / WARM_START_MODEL, tmp_path / "model"):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("w")
        disks.bring(folder, ["a"])
    shutil.rmtree(run)  # as on a new host
    disks.bring(run / WARM_START_MODEL, ["b"])
    assert (run / WARM_START_MODEL / "weights").read_text() == "w"
    assert disks.remote.names() == [WARM_START_MODEL]


def test_a_new_run_starts_with_the_states_of_a_deepspeed_checkpoint(tmp_path: Path) -> None:
    loaded, said = list[str](), list[str]()
    role: Any = SimpleNamespace(start_from=loaded.append)
    trainer = TrainerConfig(states_from={"actor": "theirs"})
    RunCheckpoints(tmp_path, trainer, [], roles={"actor": role}, parts={}, config="").start(said.append)
    assert loaded == [str(Path("theirs").absolute())]
    assert len(said) == 1
    for folders, key in (({"actor": str(tmp_path)}, "actor"), ({"critic": str(tmp_path)}, "critic")):
        with raises(InputError, field=f"trainer.states_from.{key}", value=str(tmp_path)):
            check_states_from(folders, {"actor"})
    with raises(InputError, field="trainer.states_from.actor", allowed="none"):
        check_states_from({"actor": str(tmp_path)}, {"actor"}, warm_start=True)
