"""Names `fetched:...` in a configuration become paths before anything reads it."""

import pytest

from rl_data import DataConfig, DataConfigError
from rl_runtime.config import ModelConfig
from rl_runtime.job_config import JobConfig
from rl_runtime.resolve import resolved
from rl_runtime.resolve.resolved import with_fetched_files


def test_names_become_paths_and_other_values_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("PLINTH_CACHE_DIR", str(tmp_path))
    for folder in ("SmolLM2-135M-Instruct", "sums_reasoning_gym_0.1.25"):
        (tmp_path / folder).mkdir()
    config = JobConfig(model=ModelConfig(path="fetched:smollm2"), data=DataConfig(train=("fetched:sums/train", "own")))
    made = with_fetched_files(config)
    assert made.model.path == str(tmp_path / "SmolLM2-135M-Instruct")
    assert made.data.train == (str(tmp_path / "sums_reasoning_gym_0.1.25/train.parquet"), "own")
    assert with_fetched_files(made) is made


def test_names_of_validation_are_held_out(monkeypatch):
    monkeypatch.setattr(resolved, "fetch", lambda name, held_out: f"{name.rpartition('?')[2]} {held_out}")
    data = DataConfig(train=("reasoning_gym:dice?size=2",), val=("reasoning_gym:dice?size=1",))
    made = with_fetched_files(JobConfig(data=data)).data
    assert (made.train, made.val) == (("size=2 False",), ("size=1 True",))


def test_an_unknown_name_is_refused_with_its_key():
    with pytest.raises(DataConfigError) as caught:
        with_fetched_files(JobConfig(data=DataConfig(val=("fetched:sum",))))
    assert caught.value.field == "data.val"
