"""Writes a KubeRay RayJob that runs an app on Kubernetes: `plinth rayjob APP [key=value ...] image=… nodes=2 ...`.

The operator starts a Ray cluster for the job, runs the app on its head with `resume=auto`, and removes the cluster at
the end. Keys of the job and of the app may come in any order.
"""

import importlib.metadata
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NoReturn

import yaml

from ..errors import ConfigError
from .app import ADDRESS, SAVE_FREQ, App, default_cores
from .job import require_at_least, run_job, write_job

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?")  # KubeRay adds to the name, which then has at most 63
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTP]i?)?")
_GPU = "nvidia.com/gpu"
_STOP_WAIT_S = 1800
"""Seconds that `ray job stop` gives the app to finish its step and to save."""


@dataclass(frozen=True, kw_only=True)
class RayJobConfig:
    """A RayJob of KubeRay. All other keys are those of the app."""

    image: str = ""
    """Container image with Plinth, Ray and, for GPUs, CUDA; required."""
    nodes: int = 1
    """Number of pods, the head among them; each has the same resources and should fill a node."""
    gpus_per_node: int = 0
    """GPUs of each pod; 0: the CPU."""
    cpus_per_node: int | None = None
    """CPU cores of each pod; null: 8 for each GPU and 4 more."""
    mem: str = "64Gi"
    """Memory of each pod, a quantity of Kubernetes; /dev/shm counts."""
    shm: str = "16Gi"
    """Size of /dev/shm, for NCCL, weights between processes of a pod, and Ray's object store."""
    claim: str | None = None
    """PersistentVolumeClaim with the models and data, shared by all pods (ReadWriteMany); null: everything is in the
    image, and nothing outlives the job."""
    mount: str = "/data"
    """Where the claim is mounted."""
    name: str | None = None
    """Name of the job; null: plinth-APP. A later job of the same name resumes the run."""
    namespace: str | None = None
    """Namespace; null: that of kubectl's context."""
    retries: int = 3
    """Number of new attempts, each on a new cluster, if the app or a pod fails."""
    time_limit_s: int | None = None
    """Seconds after which the operator ends the job, without a signal to the app; null: no limit."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes, such as {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}."""
    file: str = "rayjob.yaml"
    """The manifest to write; - prints it."""

    def __post_init__(self) -> None:
        if not self.image:
            raise ValueError("image is empty; allowed: a container image with Plinth, such as registry/plinth:0.2")
        require_at_least(1, self, "nodes")
        require_at_least(0, self, "gpus_per_node", "retries")
        require_at_least(1, self, "cpus_per_node", "time_limit_s", or_null=True)
        for name in ("mem", "shm"):
            if not _QUANTITY.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: a quantity such as 64Gi")
        if self.name is not None and not _LABEL.fullmatch(self.name):
            raise ValueError(
                f"name is {self.name!r}; allowed: up to 47 lowercase letters, digits and -, no - at either end"
            )
        if not self.mount.startswith("/"):
            raise ValueError(f"mount is {self.mount!r}; allowed: an absolute path")

    @property
    def cores(self) -> int:
        """CPU cores of each pod."""
        return default_cores(self.gpus_per_node) if self.cpus_per_node is None else self.cpus_per_node


def manifest(config: RayJobConfig, app: App) -> dict[str, Any]:
    """The RayJob as KubeRay 1.7 reads it.

    Raises:
        ConfigError: the app cannot run in such a job, or writes its runs where the next attempt cannot find them.
    """
    name = config.name or f"plinth-{app.arguments[0]}"
    if not _LABEL.fullmatch(name):
        raise ConfigError(f"name is {name!r}; give one with name=NAME, in lowercase letters, digits and -")
    _check_output(config, app)
    versions = _versions()
    workers = {
        "groupName": "nodes",
        "replicas": config.nodes - 1,
        "minReplicas": config.nodes - 1,
        "maxReplicas": config.nodes - 1,
        "rayStartParams": {},
        "template": _pod(config, "ray-worker"),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, **({"namespace": config.namespace} if config.namespace else {})},
        "spec": {
            "entrypoint": shlex.join(["plinth", *_app_arguments(config, app, name)]),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "backoffLimit": config.retries,
            **({"activeDeadlineSeconds": config.time_limit_s} if config.time_limit_s else {}),
            "rayClusterSpec": {
                **({"rayVersion": versions["ray"]} if "ray" in versions else {}),
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {}, "template": _pod(config, "ray-head")},
                **({"workerGroupSpecs": [workers]} if config.nodes > 1 else {}),
            },
        },
    }


def _app_arguments(config: RayJobConfig, app: App, job: str) -> list[str]:
    """The app's arguments: attempts of this job, and later jobs of its name, resume the same run."""
    arguments = list(app.job_arguments(num_nodes=config.nodes))
    key = app.name_key()
    if key is not None and app.given(key) is None:
        arguments.append(f"{key}={app.value(key)}-{job}")
    return [*arguments, *([f"{ADDRESS}=auto"] if config.nodes > 1 else [])]


def _check_output(config: RayJobConfig, app: App) -> None:
    key = app.output_key()
    if config.claim is None or key is None:
        return
    if not PurePosixPath(app.value(key)).is_relative_to(config.mount):
        raise ConfigError(
            f"{key} is {app.value(key)}, which is not on the claim {config.claim}: the runs are lost with their pod; "
            f"give {key}={config.mount}/outputs"
        )


def _pod(config: RayJobConfig, container: str) -> dict[str, Any]:
    resources = {"cpu": str(config.cores), "memory": config.mem}
    if config.gpus_per_node:
        resources[_GPU] = str(config.gpus_per_node)
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": config.shm}}]
    if config.claim is not None:
        mounts.append({"name": "data", "mountPath": config.mount})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": config.claim}})
    return {
        "spec": {
            **({"nodeSelector": dict(config.node_selector)} if config.node_selector else {}),
            "containers": [
                {
                    "name": container,
                    "image": config.image,
                    "env": [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(_STOP_WAIT_S)}],
                    # The same for both: other pods cannot take what a rank counts on.
                    "resources": {"limits": dict(resources), "requests": dict(resources)},
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        }
    }


def _versions() -> dict[str, str]:
    try:
        return {"ray": importlib.metadata.version("ray")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def write(config: RayJobConfig, app: App) -> None:
    """Writes the manifest."""
    text = yaml.safe_dump(manifest(config, app), sort_keys=False, width=100)
    write_job(config.file, text, app, _notes(config, app), submit="kubectl apply -f")


def _notes(config: RayJobConfig, app: App) -> list[str]:
    """What the user should know about this job."""
    if config.claim is None:
        return ["claim is null: checkpoints and results are lost with the pods"]
    if not app.resumes:
        return [f"{app.arguments[0]} cannot resume: each attempt starts from the beginning"]
    if app.has(SAVE_FREQ) and not app.value(SAVE_FREQ):
        return [f"{SAVE_FREQ} is 0: an attempt after a failed pod starts from the beginning"]
    return []


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Writes the manifest; exits with 2 if the app or the job refuses a key."""
    example = "image=registry/plinth:0.2 nodes=2 gpus_per_node=8 claim=models trainer.output_dir=/data/outputs"
    run_job(RayJobConfig, write, name="rayjob", doc=__doc__, example=example, argv=argv)
