"""Planted secrets are in no file of a run and not in its output: of the environment, of URLs and of keys."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from apps.distill.config import DistillConfig
from apps.grpo.config import GrpoConfig
from rl_runtime.rollout.config import EpisodeConfig
from rl_runtime.rollout.scoring_config import ScoringConfig
from rollout_vllm import RolloutConfig
from run_kit import RunFolder, Tracker, run_cli, write_report
from run_kit.config.loader import load_config
from tests.planted_secrets import ALL, ENVIRONMENT, PARAMETER, PASSWORD, leaks

URL = f"http://planted-user:{PASSWORD}@127.0.0.1:9/score?model=m&access_token={PARAMETER}"
KEY = ENVIRONMENT["PLANTED_API_KEY"]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def config_with_secrets() -> GrpoConfig:
    config = GrpoConfig()
    return replace(
        config,
        rollout=RolloutConfig(urls=(URL.partition("/score")[0],), api_key=KEY),
        reward=ScoringConfig(url=URL, api_key=KEY),
        episode=EpisodeConfig(environment="a:B", options={"search": {"api_key": "short", "stop_token": "</s>"}}),
        tracking=replace(config.tracking, mlflow_experiment=None, curves=False),
    )


def track(run: RunFolder) -> None:
    """A run of one step that prints secrets and fails."""
    with Tracker(run, config_with_secrets(), num_steps=2) as tracker:
        tracker.log(1, {"critic/score/mean": 0.5, "actor/loss": 0.1})
        tracker.log_rollouts(1, [{"prompt": "a", "response": "b", "reward": 1.0}])
        tracker.info(f"asking {URL} with {KEY}")
        print(" ".join(ALL[:-2]))
        raise ValueError(f"no answer from {URL}, header Bearer {KEY}")


def test_a_run_folder_and_its_output_hold_no_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(tmp_path, "x")
    with pytest.raises(ValueError, match="no answer"):
        track(run)
    write_report(run.path)
    shown = capfd.readouterr()
    assert leaks(shown.out + shown.err, run.path) == []
    assert "http://***@127.0.0.1:9/score?model=m&access_token=*** with ***" in run.log_file.read_text()
    written = load_config(GrpoConfig, presets=[run.config_file])
    assert written.rollout.api_key is None
    assert written.episode.options == {"search": {"api_key": None, "stop_token": "</s>"}}
    assert written.trainer == GrpoConfig().trainer


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_printed_configurations_and_errors_hold_no_secret(
    error: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "rollout.api_key=${oc.env:PLANTED_API_KEY}",
        f"reward.url={URL}",
        f'teacher.server.urls=["{URL}"]',
        "teacher.server.api_key=${oc.env:HF_TOKEN}",
    ]

    def fail(config: DistillConfig) -> None:
        raise error(f"{config.reward.url} refuses {config.rollout.api_key}")

    for last in ("--print-config", "rollout.max_model_len=${oc.env:HF_TOKEN}", f"rollout.urls=[{URL}"):
        argv = [*arguments, last]
        with pytest.raises(SystemExit):
            run_cli(DistillConfig, fail, app_name="distill", argv=argv)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(error) as raised:
        run_cli(DistillConfig, fail, app_name="distill", argv=arguments)
    sys.excepthook(error, raised.value, raised.tb)
    shown = capsys.readouterr()
    assert f"{error.__name__}: http://***@127.0.0.1:9/score?model=m&access_token=*** refuses ***" in shown.err
    assert [secret for secret in ALL if secret in shown.out + shown.err] == []
