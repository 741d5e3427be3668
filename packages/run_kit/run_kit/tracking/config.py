"""Tracking configuration."""

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Records of a run."""

    rollouts_per_step: int = 8
    """Samples (prompt, response, reward) of each step written to `rollouts/`; 0 writes none."""
    curves: bool = True
    """Draw `curves.png` at the end."""
    tensorboard: bool = True
    """Write TensorBoard events to `tensorboard/`."""
    report: bool = True
    """Write `report.html` at the end."""
    wandb_project: str | None = None
    """Weights & Biases project; null does not use it. Needs the wandb package. WANDB_ENTITY names
    the team, and WANDB_MODE=offline keeps the files in the run folder."""

    mlflow_experiment: str | None = None
    """MLflow experiment, which is created if it is new; null does not use MLflow. Needs the mlflow package."""
    mlflow_uri: str | None = None
    """MLflow's tracking server or database, such as http://host:5000 or sqlite:////data/mlflow.db; null takes
    MLFLOW_TRACKING_URI, else MLflow's default."""
    trackio_project: str | None = None
    """trackio project; null does not use it. Needs the trackio package. TRACKIO_DIR, TRACKIO_SPACE_ID and
    TRACKIO_SERVER_URL say where it is kept."""

    def __post_init__(self) -> None:
        if self.mlflow_uri is not None and self.mlflow_experiment is None:
            raise ConfigError(field="mlflow_uri", value=self.mlflow_uri, allowed="null, or set mlflow_experiment too")
        if self.rollouts_per_step < 0:
            raise ConfigError(field="rollouts_per_step", value=self.rollouts_per_step, allowed="0 or more")
