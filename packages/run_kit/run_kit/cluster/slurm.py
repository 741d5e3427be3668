"""Submits an app to SLURM: `plinth slurm [--SBATCH-OPTION=VALUE ...] APP [key=value ...]`.

The app's keys are checked first. The job starts Ray on its nodes, runs the app with `resume=auto`, and is queued again
before its time limit until the app has taken all its steps. Without arguments the batch file is printed, for changes of
your own: `sbatch [OPTION ...] FILE PYTHON APP [key=value ...]`.
"""

import contextvars
import io
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import yaml

from .. import commands
from ..config.differences import flatten
from ..config.help import default_text
from ..config.redaction import secrets_in
from ..errors import ConfigError

BATCH_FILE = Path(__file__).with_suffix(".sh")
_ADDRESS = "trainer.ray_address"
_RESUME = ("trainer.resume", "resume")
_NAME = ("trainer.experiment", "experiment", "run_tag")


def main(argv: Sequence[str] | None = None) -> int:
    """Submits the job; returns sbatch's exit code, or 2 if the app or the job refuses a key."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(__doc__ if arguments else BATCH_FILE.read_text(encoding="utf-8"), end="")
        return 0
    try:
        command = submission(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for key in secrets_in(arguments):
        print(f"warning: everybody who can list the job can read {key}; take it from a file", file=sys.stderr)
    print(shlex.join(command), flush=True)
    if shutil.which("sbatch") is None:
        print("error: this host has no sbatch; submit the job with the line above on one that has", file=sys.stderr)
        return 1
    return subprocess.run(command, check=False).returncode


def submission(arguments: Sequence[str]) -> list[str]:
    """The command line of sbatch for sbatch's options, an app and its keys.

    Raises:
        SystemExit: the app refuses its arguments; it has said why.
        ConfigError: no app is named, an argument that the job sets itself, or several nodes for an app of one node.
    """
    first = next((index for index, one in enumerate(arguments) if not one.startswith("-")), len(arguments))
    options, app = list(arguments[:first]), list(arguments[first:])
    if not app or "=" in app[0]:
        raise ConfigError("no app is named; write sbatch's options, then the app and its keys: --nodes=2 grpo preset=…")
    config = _config_of(app)
    app += _own_arguments(config, app, options)
    gpus = next((option.partition("=")[2] for option in options if option.startswith("--gpus-per-node=")), "0")
    cores = 8 * int(gpus.rpartition(":")[2]) + 4  # a rank and a server for each GPU, and the driver with its rewards
    requeue = "--requeue" if config.keys() & set(_RESUME) else "--no-requeue"
    defaults = (f"--job-name=plinth-{app[0]}", f"--cpus-per-task={cores}", requeue)  # given options override them
    return ["sbatch", *defaults, *options, str(BATCH_FILE), sys.executable, *app]


def _config_of(app: Sequence[str]) -> dict[str, str]:
    """The values of the app's configuration by dotted key, as `plinth NAME argument ... --print-config` prints it."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            code: object = contextvars.copy_context().run(commands.main, [*app, "--print-config"])
    except SystemExit as ended:
        code = ended.code
    if code not in (0, None):
        print(printed.getvalue(), end="", file=sys.stderr)
        raise SystemExit(code)
    config = yaml.safe_load(printed.getvalue())
    if not isinstance(config, dict):
        raise ConfigError(f"{app[0]} has no configuration; name an app, such as grpo")
    return flatten(config, text=default_text)


def _own_arguments(config: Mapping[str, str], app: Sequence[str], options: Sequence[str]) -> list[str]:
    """Keys that the job sets: it resumes its own run, whose name has the job's number, and starts Ray."""
    several = [option for option in options if option.startswith("--nodes=") and option != "--nodes=1"]
    if several and _ADDRESS not in config:
        raise ConfigError(f"{app[0]} runs on one node (it has no {_ADDRESS})", field="nodes", value=several[0])
    if (address := config.get(_ADDRESS, "null")) != "null":
        raise ConfigError(field=_ADDRESS, value=address, allowed="null, because the job starts Ray and sets it")
    given = dict(argument.split("=", 1) for argument in app[1:] if "=" in argument)
    resume, name = (next((key for key in keys if key in config), "") for keys in (_RESUME, _NAME))
    if resume and given.get(resume, "auto") != "auto":
        raise ConfigError(field=resume, value=given[resume], allowed="auto, because the job resumes its own run")
    if resume and (start := config.get(f"{resume}_from", "null")) != "null":
        remedy = f"the job would start there each time that it is queued again; give {name} and the folder of that run"
        raise ConfigError(field=f"{resume}_from", value=start, remedy=remedy)
    own = [f"{resume}=auto"] if resume and resume not in given else []
    return [*own, f"{name}={config[name]}-@JOB_ID@"] if name and name not in given else own
