"""Writes a batch file for SLURM that runs an app: `plinth slurm APP [key=value ...] nodes=2 gpus_per_node=4 ...`.

The job starts Ray on its nodes, runs the app with `resume=auto`, and is queued again before its time limit until the
app has taken all its steps. Keys of the job and of the app may come in any order.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..signals import STOPPED_BY_USR1
from .app import ADDRESS, SAVE_FREQ, App, default_cores
from .job import require_at_least, run_job, write_job

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
_MAX_TEMP_DIR = 20  # characters: the path of a socket has at most 107, Ray's names below this folder up to 87


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """A job of SLURM. All other keys are those of the app."""

    nodes: int = 1
    """Number of nodes. One node runs the app as on a workstation; several form a Ray cluster of this job."""
    gpus_per_node: int = 0
    """GPUs of each node; 0: the CPU."""
    cpus_per_node: int | None = None
    """CPU cores of each node; null: 8 for each GPU and 4 more."""
    mem: str = "0"
    """Memory of each node as SLURM writes it, such as 200G; 0: all of it."""
    time: str = "04:00:00"
    """Time limit as SLURM writes it: minutes, HH:MM:SS or D-HH:MM:SS."""
    stop_before_s: int = 600
    """Seconds before the time limit at which the app is asked to stop: more than its longest step and a checkpoint
    take."""
    max_requeues: int = 100
    """Number of times that the job is queued again; 0: never."""
    job_name: str | None = None
    """Name of the job; null: plinth-APP. The log is JOB_NAME_JOB_ID.log in this folder."""
    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account to charge; null: your default."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as --constraint=h100 or --mail-type=END."""
    setup: tuple[str, ...] = ()
    """Shell lines before the app starts, such as `module load cuda`."""
    temp_dir: str = "/tmp"
    """Folder on each node's own disk for the sockets and logs of Ray, which are removed at the end."""
    object_store_gib: float = 1.0
    """Shared memory of Ray on each node; samples travel through it, weights do not."""
    start_timeout_s: int = 600
    """Seconds in which all nodes have to join Ray."""
    file: str = "plinth.sbatch"
    """The batch file to write; - prints it."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "nodes", "stop_before_s", "start_timeout_s")
        require_at_least(0, self, "gpus_per_node", "max_requeues")
        require_at_least(1, self, "cpus_per_node", or_null=True)
        if not _TIME.fullmatch(self.time):
            raise ValueError(f"time is {self.time!r}; allowed: minutes, HH:MM:SS or D-HH:MM:SS")
        if time_limit_s(self.time) <= self.stop_before_s:
            raise ValueError(f"stop_before_s is {self.stop_before_s}; allowed: less than time ({self.time})")
        require_at_least(0.1, self, "object_store_gib")
        if not self.temp_dir.startswith("/") or len(self.temp_dir) > _MAX_TEMP_DIR:
            raise ValueError(
                f"temp_dir is {self.temp_dir!r}; allowed: an absolute path of at most {_MAX_TEMP_DIR} characters, "
                "because the paths of Ray's sockets below it are limited"
            )
        if self.job_name is not None and not _NAME.fullmatch(self.job_name):
            raise ValueError(f"job_name is {self.job_name!r}; allowed: letters, digits and . _ + = -")
        for option in self.sbatch:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"sbatch has {option!r}; allowed: options on one line that begin with -")

    @property
    def cores(self) -> int:
        """CPU cores of each node."""
        return default_cores(self.gpus_per_node) if self.cpus_per_node is None else self.cpus_per_node


def time_limit_s(text: str) -> int:
    """Seconds of a time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def batch_file(config: SlurmConfig, app: App, *, command: str, folder: Path, python: str = sys.executable) -> str:
    """The text of the batch file.

    Args:
        command: the command that the user typed.
        folder: where the job runs.
        python: the interpreter of the job.

    Raises:
        ConfigError: the app cannot run in such a job.
    """
    name = config.job_name or f"plinth-{app.arguments[0]}"
    requeues = config.max_requeues if app.resumes else 0
    options = [
        f"--job-name={name}",
        f"--chdir={folder}",
        f"--output={name}_%j.log",
        "--open-mode=append",
        f"--nodes={config.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={config.cores}",
        f"--mem={config.mem}",
        *([f"--gpus-per-node={config.gpus_per_node}"] if config.gpus_per_node else []),
        f"--time={config.time}",
        f"--signal=B:USR1@{config.stop_before_s}",
        "--requeue" if requeues else "--no-requeue",
        *([f"--partition={config.partition}"] if config.partition else []),
        *([f"--account={config.account}"] if config.account else []),
        *config.sbatch,
    ]
    has_ray = config.nodes > 1
    return _filled(
        "slurm.sh",
        ray=_ray_part(config) if has_ray else "",
        stop_ray="stop_ray" if has_ray else "",
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in options),
        command=command.replace("\n", " "),
        setup="\n".join(config.setup),
        python=shlex.quote(python),
        app="\n".join(f"    {argument}" for argument in _app_arguments(config, app)),
        stop_before_s=str(config.stop_before_s),
        then=(
            f"finishes its step, saves and exits with {STOPPED_BY_USR1}; the job is queued again and resumes."
            if requeues
            else f"stops, with exit code {STOPPED_BY_USR1} if it is not done."
        ),
        stopped=str(STOPPED_BY_USR1),
        max_requeues=str(requeues),
    )


def _ray_part(config: SlurmConfig) -> str:
    return _filled(
        "slurm_ray.sh",
        gpus_per_node=str(config.gpus_per_node),
        object_store_bytes=str(int(config.object_store_gib * 2**30)),
        temp_dir=shlex.quote(config.temp_dir),
        start_timeout_s=str(config.start_timeout_s),
        address_key=ADDRESS,
    )


def _app_arguments(config: SlurmConfig, app: App) -> list[str]:
    """The app's arguments for the shell. A job's runs have its number in their name, and resume only each other."""
    arguments = [shlex.quote(argument) for argument in app.job_arguments(num_nodes=config.nodes)]
    name = app.name_key()
    if name is not None and app.given(name) is None:
        arguments.append(f'{name}={shlex.quote(str(app.value(name)))}-"$SLURM_JOB_ID"')
    return arguments


def _filled(template: str, **values: str) -> str:
    """A template of this folder with a value for every `@name@`; lines that an empty value leaves empty are dropped."""
    text = (Path(__file__).parent / template).read_text(encoding="utf-8")
    text = re.sub(r"^@(\w+)@\n", lambda match: f"{values[match[1]]}\n" if values[match[1]] else "", text, flags=re.M)
    return re.sub(r"@([a-z_]+)@", lambda match: values[match[1]], text)


def write(config: SlurmConfig, app: App) -> None:
    """Writes the batch file."""
    command = shlex.join(["plinth", "slurm", *sys.argv[2:]]) if sys.argv[1:2] == ["slurm"] else "plinth slurm"
    text = batch_file(config, app, command=command, folder=Path.cwd())
    missing = [f"{path} does not exist on this host" for path in app.missing_inputs()]
    write_job(config.file, text, app, _notes(app), submit="sbatch", warnings=missing)


def _notes(app: App) -> list[str]:
    """What the user should know about this job."""
    if not app.resumes:
        return [f"{app.arguments[0]} cannot resume: the job is not queued again after its time limit"]
    if app.has(SAVE_FREQ) and not app.value(SAVE_FREQ):
        return [f"{SAVE_FREQ} is 0: a checkpoint is written before the time limit only; steps are lost if a node fails"]
    return []


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Writes the batch file; exits with 2 if the app or the job refuses a key."""
    example = "nodes=2 gpus_per_node=4 time=1-00:00:00 partition=gpu setup=[module load cuda]"
    run_job(SlurmConfig, write, name="slurm", doc=__doc__, example=example, argv=argv)
