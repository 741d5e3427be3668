"""Which checkpoints a run refuses to resume from before it changes an engine, and what it restores.

The tests of the apps save and load engines.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt import ArchitectureMismatchError, Checkpoint, CheckpointManager, RemoteCheckpoints, capture_rng
from rl_runtime import find_checkpoint
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import InputError
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.checkpoints import RunCheckpoints
from rl_runtime.training.uploads import WARM_START_MODEL, check_checkpoint_url, open_uploader

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
    for roles, error, message in (
        (
            {"actor": Loads(wider)},
            ArchitectureMismatchError,
            r"another 'actor'.*w \[2, 3\] in the checkpoint, \[2, 4\] here",
        ),
        ({"actor": Loads(adapters)}, ArchitectureMismatchError, "only here: w.lora_A"),
        ({"actor": Loads(MODEL), "critic": Loads(MODEL)}, InputError, "has no 'critic'"),
    ):
        sampler = Loads({})
        with pytest.raises(error, match=message):
            checkpoints(roles, sampler).load(saved)
        assert [one.loaded for one in (*roles.values(), sampler)] == [[]] * (len(roles) + 1)


def test_the_same_model_in_another_dtype_is_loaded(tmp_path: Path) -> None:
    saved = save(tmp_path, "actor", "critic")
    actor, sampler = Loads({"w": {"shape": [2, 3], "dtype": "float32"}}), Loads({})
    checkpoints({"actor": actor}, sampler).load(saved)
    assert actor.loaded == [str(saved.path / "actor")]
    assert sampler.loaded == [{"at": 3}]


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
    found = find_checkpoint(trainer, skipped.append)
    return found and found.step, skipped


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
    with pytest.raises(InputError, match=r"step 2 of .*manifest\.json.* and 1 more;.*start_over_if_damaged=true"):
        find(tmp_path)
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
    for name in newer._folders()[1:]:  # step 2
        (storage / "run_20260102_000000" / name / "state.json").write_text("{")
    step, lines = find(here, **url)
    assert step == 1
    assert lines[0].startswith("step 2 of run_20260102_000000 is skipped: ")
    assert "the download is damaged: state.json: torn" in lines[0]
    assert find(here, resume_from=newer.url)[0] == 1
    assert find(here, resume_from=remote.url)[0] == 5
    with pytest.raises(InputError, match=r"trainer.resume_from is file://.*/nowhere, where there is no checkpoint"):
        find(here, resume_from=f"file://{storage}/nowhere")


def test_a_storage_that_does_not_answer_is_no_reason_to_start_over(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trainer.checkpoint_url is .*nothing://x.*: Protocol not known: nothing"):
        find(tmp_path, checkpoint_url="nothing://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"trainer.checkpoint_url is .*cannot be written"):
        check_checkpoint_url(TrainerConfig(checkpoint_url=f"file://{tmp_path}/file/runs"))


def test_the_run_uploads_what_it_publishes_and_reports_seconds_and_bytes(tmp_path: Path) -> None:
    trainer = TrainerConfig(
        save_freq=1, background_save=False, keep_checkpoints=1, checkpoint_url=f"file://{tmp_path}/s"
    )
    run, said = tmp_path / "run_20260101_000000", []
    with open_uploader(trainer, run, said.append) as uploader:
        assert uploader is not None
        group: Any = RankOfThisProcess(1)
        folder = run / "checkpoints"
        with RunCheckpoints(folder, trainer, [group], roles={}, parts={}, config="", uploader=uploader) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, {})
        uploader.close()
        metrics = checkpoints.take_metrics()
        assert checkpoints.take_metrics() == {}
    remote = RemoteCheckpoints(f"file://{tmp_path}/s/{run.name}")
    assert remote.steps() == CheckpointManager(folder).steps() == [2]
    assert metrics["checkpoint/upload_bytes"] >= CheckpointManager(folder).manifest(2).num_bytes
    assert 0 < metrics["checkpoint/upload_s"] < 60
    assert said[-1] == f"checkpoints in {remote.url}: step 2"
    with open_uploader(TrainerConfig(checkpoint_url=f"file://{tmp_path}/unused"), run, said.append):
        pass
    assert said[-2:] == [
        "trainer.save_freq is 0: a checkpoint is written and uploaded only when a signal stops the run",
        f"checkpoints in file://{tmp_path}/unused/{run.name}: none",
    ]
    with pytest.raises(InputError, match="has the checkpoints of another run"), open_uploader(trainer, run, print):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint_url": "runs"}, "checkpoint_url is 'runs'; allowed: a URL"),
        ({"checkpoint_url": "s3://"}, "checkpoint_url is 's3://'; allowed: a URL"),
        ({"checkpoint_url": "memory://runs"}, "memory:// ends with this process"),
        ({"checkpoint_url": "file://runs"}, "allowed: an absolute folder"),
        ({"checkpoint_url": "webdav://me:secret@host/runs"}, "checkpoint_url has a password"),
        ({"resume_from": "memory://runs/run", "resume": "auto"}, "resume_from is 'memory"),
    ],
)
def test_urls_that_cannot_hold_checkpoints_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        TrainerConfig(**settings)
    assert "secret" not in str(raised.value)
