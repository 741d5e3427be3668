"""Planted secrets are in no file of a run and not in its output: of the environment, of URLs and of keys."""

import base64
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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


class _Service(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    num_allowed = 0

    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        expected = "Basic " + base64.b64encode(f"planted-user:{PASSWORD}".encode()).decode()
        allowed = self.headers["Authorization"] == expected and self.path.endswith(f"access_token={PARAMETER}")
        type(self).num_allowed += allowed
        # One refusal in four is printed with the samples that failed.
        self._answer(200 if allowed and self.num_allowed % 4 else 400, {"score": 0.5})

    def _answer(self, status: int, answer: Any) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def reward_service() -> Iterator[int]:
    """Serves rewards to who has the password and the parameter. Yields its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.thorough
def test_a_whole_run_with_secrets_leaves_none_behind(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    with reward_service() as port:
        app = start_app(
            tmp_path,
            f"reward.url={URL.replace(':9/', f':{port}/')}",
            "rollout.api_key=${oc.env:PLANTED_API_KEY}",
            "trainer.total_training_steps=2",
            "trainer.save_freq=1",
            "warm_start.steps=20",
            "task.num_val=32",
            "task.num_demonstrations=2000",
            "batch.train_batch_size=8",
            "batch.mini_batch_size=4",
            "sampling.n=4",
            "trainer.val_before_train=false",
        )
        app.wait_for("s/step")
        [gcs] = app.children("gcs_server")
        ray_token = gcs.environ()["RAY_AUTH_TOKEN"]
        assert app.finish() == 0, app.output
    assert _Service.num_allowed > 32, "the service was asked with the password"
    (run,) = tmp_path.iterdir()
    assert "report.html" in {path.name for path in run.iterdir()}
    assert leaks(app.output, run, [*ALL, ray_token]) == []
