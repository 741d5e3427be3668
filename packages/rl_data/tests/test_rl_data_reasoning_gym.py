"""Problems and verifiers of reasoning-gym by name, with the real package from the index; skipped without the index."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_data_rows import iter_rows

from rl_data import DataConfig, DataConfigError, make_reward, reward_for
from rl_data.package_index import FetchError, fetch_reasoning_gym, import_reasoning_gym
from rl_data.rows import Row
from rl_data.tasks import fetched

TRAIN, VAL = "reasoning_gym:chain_sum?size=40&max_terms=2&max_digits=1", "reasoning_gym:chain_sum?size=12&max_digits=1"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder with the package, which tests can import."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLINTH_CACHE_DIR", str(folder))
        try:
            site = fetch_reasoning_gym("a test")
        except FetchError as error:
            pytest.skip(str(error))
        patch.setattr(sys, "path", [*sys.path, *([str(site)] if site else [])])
        yield folder


def rows_of(name: str, *, held_out: bool = False) -> list[Row]:
    return list(iter_rows(fetched.fetch(name, held_out=held_out), DataConfig()))


@pytest.mark.slow
@pytest.mark.long
def test_problems_for_training_and_validation_share_no_question(package: Path, monkeypatch: Any) -> None:
    train, val = rows_of(TRAIN), rows_of(VAL, held_out=True)
    assert (len(train), len(val)) == (40, 12)
    assert not [row for row in train if row.messages in [other.messages for other in val]]
    assert train[0].data_source == "reasoning_gym"
    reward = reward_for("reasoning_gym")
    for row in val:
        assert not reward.problem(row.ground_truth, row.extra)
        for response in (
            "{}",
            "It is <answer> {} </answer>.",
            "1 <answer>1</answer> <answer>{}</answer>",
            "so\n#### {}",
        ):
            assert reward(response.format(row.ground_truth), row) == 1.0, response
        assert reward(f"it is {row.ground_truth}", row) < 1.0
        assert reward("", row) == reward("<answer></answer>", row) == 0.0
    monkeypatch.setattr(fetched, "run_module", None)
    assert rows_of(TRAIN) == train, "made once"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("rest", "allowed"),
    [
        ("chan_sum", "chain_sum"),
        ("chain_sum?sise=3", "min_terms"),
        ("chain_sum?size=none", "size=1 or more"),
        ("chain_sum?size=0", "size=1 or more"),
        ("chain_sum?seed=-1", "seed=0 or more"),
        ("chain_sum?min_terms=4&max_terms=2", None),
        ("coin_flip?min_trials=1&max_trials=1&size=400", "at most size="),
    ],
)
def test_a_name_of_which_no_problems_can_be_made_is_refused(package: Path, rest: str, allowed: str | None) -> None:
    before = sorted(package.rglob("*.parquet"))
    with pytest.raises(DataConfigError) as caught:
        fetched.fetch(f"reasoning_gym:{rest}", held_out=True)
    assert caught.value.value == f"reasoning_gym:{rest}"
    assert allowed is None or allowed in str(caught.value.allowed)
    assert sorted(package.rglob("*.parquet")) == before


@pytest.mark.slow
@pytest.mark.long
def test_an_answer_that_a_verifier_evaluates_reaches_nothing_outside(package: Path, tmp_path: Path) -> None:
    (row,) = rows_of("reasoning_gym:countdown?size=1")
    reward, mark = make_reward("reasoning_gym"), tmp_path / "mark"
    assert reward(f"<answer>{row.ground_truth}</answer>", row) == 1.0
    assert reward("1 + 1", row) < 0.1
    assert reward(f"__import__('pathlib').Path('{mark}').touch()", row) < 0.1
    assert not mark.exists()


def test_rows_without_the_columns_of_the_verifier_are_refused() -> None:
    reward = make_reward("reasoning_gym")
    assert "entry" in reward.problem("1", {"task": "chain_sum"})
    assert reward.problem("", {"task": "chain_sum", "entry": "{}"}) == ""


def test_without_the_package_the_reward_says_how_to_get_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PLINTH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataConfigError) as caught:
        make_reward("reasoning_gym").prepare()
    assert "pip install reasoning-gym==" in str(caught.value.remedy)


@pytest.mark.thorough
def test_the_verifier_of_every_task_takes_its_own_answer_from_the_file(package: Path, tmp_path: Path) -> None:
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found]

    tasks = sorted(DATASETS.keys() - {"composite"})  # a mixture: several names do the same
    assert len(tasks) >= 100
    for task in tasks:
        fetched._write_problems({"name": task, "size": 1, "seed": 3, "held_out": False}, tmp_path / task)
        (row,) = iter_rows(tmp_path / task / f"{task}.parquet", DataConfig())
        reward = reward_for(row.data_source)
        if row.ground_truth:
            assert reward(row.ground_truth, row) == 1.0, task
        assert 0.0 <= reward("no answer at all", row) <= 1.0, task
