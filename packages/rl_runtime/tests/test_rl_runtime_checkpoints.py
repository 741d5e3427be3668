"""Which checkpoints a run refuses to resume from before it changes an engine, and what it restores.

The tests of the apps save and load engines.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from ckpt import ArchitectureMismatchError, Checkpoint, CheckpointManager, capture_rng
from rl_runtime import find_checkpoint
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import InputError
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.checkpoints import RunCheckpoints

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
