"""A vision-language model learns to count shapes and plays on boards that it sees: SFT, packed GRPO, vLLM."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apps.evaluate.main import cli
from rl_data.tasks.shapes import write_shapes
from tests.run_folders import column, rollouts

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("files") / "shapes", num_train=256, num_val=128)


def keys_of(files: Path, train: str, val: str, warm_start: str) -> list[str]:
    """The files of a preset in this folder."""
    names = {"data.train": train, "data.val": val, "warm_start.files": warm_start}
    return [f"model.path={files / 'model'}", *(f"{key}=[{files / name}.parquet]" for key, name in names.items())]


# Twelve steps, after all of the warm start, take a minute of two cores; what they add is that the score rises.
@pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_grpo_teaches_a_model_to_count_what_it_sees(
    learns: bool, tmp_path: Path, files: Path, start_app: Callable[..., Any]
) -> None:
    steps = 12 if learns else 3
    app = start_app(
        tmp_path / "runs",
        *("preset=shapes", f"trainer.total_training_steps={steps}", "sync.verify=true"),
        *(() if learns else ("warm_start.steps=20", "trainer.val_before_train=false")),
        *keys_of(files, "train", "val", "demonstrations"),
    )
    run = app.succeeded()
    scores = column(run, "val/score/mean")
    if learns:
        assert scores[-1] > scores[0] + 0.1  # 0.156 on two CPUs; 0.05 is a standard error of 128 problems
    assert 0 < scores[-1] < 1
    assert min(column(run, "actor/grad_norm")) > 0
    # Servers see what the ranks see, also after pushes.
    gaps = column(run, "rollout/log_prob_mismatch_max")
    assert len(gaps) == steps
    assert max(gaps) < 1e-3
    assert all(Path(name).is_file() for sample in rollouts(run) for name in sample["images"])
    assert not (run / "images").exists()


@pytest.fixture(scope="module")
def supervised(files: Path, start_shared_app: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an SFT that learns to name colors."""
    folder = tmp_path_factory.mktemp("supervised")
    app = start_shared_app(
        folder,
        f"model.path={files / 'model'}",
        f"supervised.files=[{files}/demonstrations.parquet]",
        *("supervised.steps=60", "supervised.batch_size=32", "supervised.val_size=64", "supervised.num_samples=8"),
        *("supervised.sample_tokens=3", "supervised.optim.lr=2e-3", "engine.dtype=float32", "engine.zero.stage=2"),
        *("engine.gradient_checkpointing=false", "trainer.test_freq=60"),
        app="sft",
    )
    return app.succeeded()


@pytest.mark.thorough
def test_sft_and_its_greedy_responses_see_images(supervised: Path) -> None:
    losses = column(supervised, "val/loss")
    # Colors are always right, and only an image tells them: without it they cost log(3) / 3 of a token's loss alone.
    assert losses[-1] < losses[0] / 2
    named = [(one["response"].split(), one["demonstrated"].split()) for one in rollouts(supervised)[-8:]]
    assert sum(len(said) > 1 and said[1] == shown[1] for said, shown in named) >= 7


@pytest.mark.thorough
def test_an_evaluation_sees_images_and_names_their_files(tmp_path: Path, files: Path, supervised: Path) -> None:
    model = supervised / "model"
    settings = ("reward.function=rl_data.tasks.shapes:reward", "sampling.max_tokens=3", "data.max_prompt_length=24")
    with pytest.raises(SystemExit) as end:
        cli(argv=[f"model.path={model}", f"data.val={files}/val.parquet", f"output_dir={tmp_path / 'out'}", *settings])
    assert end.value.code == 0
    (folder,) = (tmp_path / "out").iterdir()
    prompts = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    pairs = [(sample, prompt["ground_truth"]) for prompt in prompts for sample in prompt["samples"]]
    assert len(pairs) == 128
    assert all(Path(name).is_file() for sample, _ in pairs for name in sample["images"])
    assert len({name for sample, _ in pairs for name in sample["images"]}) > 100
    named = [sample["response"].split()[1:2] == truth.split()[1:2] for sample, truth in pairs]
    assert sum(named) > 0.8 * len(named), "the colors are on the images alone"


@pytest.mark.thorough
def test_every_turn_of_a_game_sees_the_boards_before_it(
    tmp_path: Path, files: Path, start_app: Callable[..., Any]
) -> None:
    app = start_app(
        tmp_path / "runs",
        "preset=grid",
        *keys_of(files, "boards", "val_boards", "moves"),
        "trainer.total_training_steps=2",
        "warm_start.steps=60",
    )
    run = app.succeeded()
    assert max(column(run, "rollout/log_prob_mismatch_max")) < 1e-3
    seen = {(sample["num_turns"], len(sample["images"])) for sample in rollouts(run)}
    assert (2, 2) in seen
    assert seen <= {(1, 1), (2, 2)}
