"""Experiment services that a run reports to: Weights & Biases, MLflow and trackio.

Each is used when `tracking` names a project of it, and needs its own package. A service keeps what it was sent, so
`SentOnce` sends each step once: a resumed run continues the service's run and leaves out the steps that this has.
"""

import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config.differences import flatten
from ..config.redaction import redact
from ..errors import TrackingError
from .config import TrackingConfig
from .metrics_table import MetricsTable, atomic_write

Metrics = Mapping[str, float | int]

_MLFLOW_FORBIDDEN = re.compile(r"[^\w\-. /:]", re.ASCII)
_IDS_FILE = "services.json"
"""File of the run folder: package -> the id of the service's run."""
_MLFLOW_BATCH = 100
"""Parameters that MLflow accepts at once."""


class WandbService:
    """A run of Weights & Biases. Its charts are over the metric `step`, so steps may come in any order."""

    def __init__(self, config: TrackingConfig, folder: Path, settings: Mapping[str, Any], run_id: str | None) -> None:
        wandb = _imported("wandb", config)
        self._run = wandb.init(
            project=config.wandb_project,
            dir=str(folder),
            config=dict(settings),
            **({"name": folder.name} if run_id is None else {"id": run_id, "resume": "allow"}),
        )
        self.run_id: str = self._run.id
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics; wandb sends them in the background."""
        self._run.log({"step": step, **metrics})

    def close(self, *, failed: bool) -> None:
        """Finish the run; waits for pending uploads."""
        self._run.finish(exit_code=int(failed))


class MlflowService:
    """A run of an MLflow experiment. Characters of names that MLflow forbids become `_`: `pass@4` is `pass_4`."""

    def __init__(self, config: TrackingConfig, folder: Path, settings: Mapping[str, Any], run_id: str | None) -> None:
        mlflow = _imported("mlflow", config)
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=config.mlflow_uri)
        if run_id is None:
            run_id = self._create(str(config.mlflow_experiment), folder.name, flatten(settings))
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id: str = run_id

    def _create(self, experiment: str, name: str, settings: Mapping[str, str]) -> str:
        existing = self._client.get_experiment_by_name(experiment)
        run = self._client.create_run(
            self._client.create_experiment(experiment) if existing is None else existing.experiment_id, run_name=name
        )
        params = [
            self._entities.Param(_MLFLOW_FORBIDDEN.sub("_", key), value[:500])  # all that older servers take
            for key, value in settings.items()
        ]
        for first in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(run.info.run_id, params=params[first : first + _MLFLOW_BATCH])
        return str(run.info.run_id)

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the metrics and wait for the answer."""
        now_ms = int(time.time() * 1000)
        values = [
            self._entities.Metric(_MLFLOW_FORBIDDEN.sub("_", name), float(value), now_ms, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self.run_id, metrics=values)

    def close(self, *, failed: bool) -> None:
        """Set the run's status."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class TrackioService:
    """A run of a trackio project: in the folder TRACKIO_DIR, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says."""

    def __init__(self, config: TrackingConfig, folder: Path, settings: Mapping[str, Any], run_id: str | None) -> None:
        self.run_id = run_id or folder.name
        self._run = _imported("trackio", config).init(
            project=str(config.trackio_project),
            name=self.run_id,
            config=dict(settings),
            resume="never" if run_id is None else "allow",
            embed=False,
            auto_log_gpu=False,  # the run's own metrics have the memory
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics; trackio writes them in the background."""
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        """Finish the run; waits for what is not written yet."""
        del failed  # trackio has no status for it
        self._run.finish()


Service = WandbService | MlflowService | TrackioService
_SERVICES: dict[str, tuple[str, type[Service]]] = {
    "wandb": ("wandb_project", WandbService),
    "mlflow": ("mlflow_experiment", MlflowService),
    "trackio": ("trackio_project", TrackioService),
}
"""Package -> the key of TrackingConfig that switches the service on, and its class."""


class SentOnce:
    """A metric writer that sends each step to a service once.

    A failure to send is a warning, since `metrics.tsv` has the same numbers: a training run does not end because a
    server is away.

    Args:
        package: the package of the service.
        last_step: the last step that the service has of the run that this one continues; None for a new run.
    """

    def __init__(self, package: str, service: Service, *, last_step: int | None = None) -> None:
        self.package = package
        self.run_id = service.run_id
        self._service = service
        self._last_step = last_step

    def describe(self) -> str:
        """The service's run, and up to which step it is there already."""
        if self._last_step is None:
            return f"{self.package}: new run {self.run_id}"
        return f"{self.package}: continues run {self.run_id}, which has the steps up to {self._last_step}"

    def write(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of a step, unless the service has it from before the run was resumed."""
        if self._last_step is None or step > self._last_step:
            self._try(f"did not take step {step}", lambda: self._service.log(step, metrics))

    def rewind(self, step: int, *, last_step: int) -> str:
        """Leave out the steps up to `last_step` when the run takes them again; says which."""
        self._last_step = max(last_step, -1 if self._last_step is None else self._last_step)
        if self._last_step <= step:
            return ""
        return f"{self.package} keeps the steps {step + 1} to {self._last_step} as it has them"

    def close(self, *, failed: bool = False) -> None:
        """Finish the service's run."""
        self._try("did not finish its run", lambda: self._service.close(failed=failed))

    def _try(self, problem: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            print(f"warning: {self.package} {problem}: {redact(str(error))}", file=sys.stderr, flush=True)


def check_tracking(config: TrackingConfig) -> None:
    """Check before a run starts that its tracking configuration can work; creates and connects nothing.

    Raises:
        TrackingError: a package that the config needs is not installed.
    """
    for package in _chosen(config):
        _imported(package, config)


def open_services(
    config: TrackingConfig, folder: Path, settings: Mapping[str, Any], *, before: Path | None
) -> list[SentOnce]:
    """Start a run at each service that is on, or continue that of the run folder `before`; writes `services.json`.

    Args:
        folder: the run folder, which names the runs.
        settings: the configuration as a tree.
        before: the folder of the run that this one resumes; None for a new run.

    Raises:
        TrackingError: a service is missing or cannot start the run.
    """
    known = _ids(before)
    last_step = None if before is None else _last_step(before, known)
    opened = []
    for package in _chosen(config):
        key, service = _SERVICES[package]
        run_id = known.get(package)
        try:
            run = service(config, folder, settings, run_id)
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(
                f"{package} could not start a run: {redact(str(error))}",
                field=f"tracking.{key}",
                value=getattr(config, key),
                remedy="check its address and log-in, or leave the key unset",
            ) from error
        opened.append(SentOnce(package, run, last_step=last_step if run_id else None))
    if opened:
        atomic_write(folder / _IDS_FILE, json.dumps({one.package: one.run_id for one in opened}) + "\n")
    return opened


def _chosen(config: TrackingConfig) -> list[str]:
    return [package for package, (key, _) in _SERVICES.items() if getattr(config, key) is not None]


def _ids(folder: Path | None) -> dict[str, str]:
    try:
        return {} if folder is None else dict(json.loads((folder / _IDS_FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):  # none, or a file that says something else
        return {}


def _last_step(before: Path, known: Mapping[str, str]) -> int:
    """The last step that the run folder `before` and its neighbors sent to the service's runs.

    A neighbor is a run that was resumed from the same checkpoint and died before it saved one of its own.
    """
    files = [folder / "metrics.tsv" for folder in before.parent.iterdir() if _ids(folder) == known]
    return max((step for file in files if file.exists() for step in MetricsTable(file).steps), default=0)


def _imported(package: str, config: TrackingConfig) -> Any:
    """The package of a service that is on."""
    key, _ = _SERVICES[package]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TrackingError(
            f"the {package} package does not import ({error})",
            field=f"tracking.{key}",
            value=getattr(config, key),
            remedy=f"pip install {package}, or leave the key unset",
        ) from None
