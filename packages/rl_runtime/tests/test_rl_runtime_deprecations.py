"""Old public names work for one version and warn."""

import subprocess
import sys

import pytest
import torch

import rl_runtime
import run_kit
from rl_runtime import ExperienceBatch, JobConfig


@pytest.mark.parametrize(("old", "new"), rl_runtime._RENAMED.items())
def test_a_renamed_name_warns_and_works(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"rl_runtime.{old} is deprecated: use rl_runtime.{new}"):
        assert getattr(rl_runtime, old) is getattr(rl_runtime, new)


def test_a_name_that_moved_to_run_kit_warns_and_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"import run_kit.run_cli"):
        assert rl_runtime.run_cli is run_kit.run_cli  # type: ignore[attr-defined]


def test_a_renamed_method_warns_and_works() -> None:
    with pytest.warns(DeprecationWarning, match="use with_per_sequence"):
        batch = ExperienceBatch(items=()).with_constant("x", torch.zeros(0))
    assert batch.columns == {"x": ()}


def test_a_renamed_config_key_warns_and_works() -> None:
    with pytest.warns(DeprecationWarning, match="keep_unfinished"):
        config = run_kit.load_config(JobConfig, overrides=["oversampling.keep_unfinished=false"])
    assert not config.oversampling.partial_rollouts


def test_the_old_report_command_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rl_runtime.report", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "plinth report RUN_FOLDER" in done.stdout
    assert done.stderr == "warning: python -m rl_runtime.report is deprecated: use plinth report\n"
