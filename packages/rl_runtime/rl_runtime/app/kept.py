"""A run's servers, kept for the next run of the same model and keys (`trainer.keep_servers`).

At its end the run leaves its servers to a new process, the standby. The standby runs the same command line up to the
point where a run gets its folder: it imports the libraries, checks, starts Ray and new ranks, and lets these build and
drop the models once. Then it waits. The next command of this user hands its command line, environment and streams to
the standby, which runs it, and passes on signals and the exit code. A standby runs one command and leaves the servers
of that to the next standby.

This module imports no library: a command asks for a standby before anything else.
"""

import hashlib
import importlib
import json
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from run_kit.cli import INVOKED_AS
from run_kit.errors import OWN_PACKAGES

from ..ranks.environment import installed_releases

if TYPE_CHECKING:
    from ..launch.ahead import SessionKeys
    from ..launch.session import HostDevices, Session

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OF_THE_TERMINAL = (
    "_",
    *["PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM", "STY", "WINDOWID", "PS1", "XDG_SESSION_ID"],
)
_PREFIXES_OF_THE_TERMINAL = ("SSH_", "TMUX", "TERM_", "VSCODE_", "PYTEST_")
"""Variables that no run reads, and that differ between two shells."""
_MIB_OF_OTHERS = 1024
"""GPU memory that other programs may have taken while a session was kept."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line with everything around it that a run may read."""

    app: str
    """The app's module, which has a function `cli`."""
    arguments: tuple[str, ...]
    invoked_as: str
    folder: str
    environment: Mapping[str, str]
    python: str

    @classmethod
    def current(cls, app: str, arguments: Sequence[str]) -> "Command":
        """The command of this process, before it changes its environment; in a standby the command that it received."""
        return _received or cls(
            app=app,
            arguments=tuple(arguments),
            invoked_as=INVOKED_AS.get(),
            folder=str(Path.cwd()),
            environment=dict(os.environ),
            python=sys.executable,
        )

    def why_not(self, other: "Command") -> str:
        """Reason why a process that was started for this command cannot run `other`; empty if it can."""
        for name in ("app", "folder", "python"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"the {name} was {mine}, and is {theirs}"
        names = self.environment.keys() | other.environment.keys()
        changed = sorted(n for n in names if self.environment.get(n) != other.environment.get(n) and not _is_idle(n))
        return f"the environment differs in {', '.join(changed)}" if changed else ""


_received: Command | None = None
COMMAND: ContextVar[Command | None] = ContextVar("COMMAND", default=None)
"""The command that this process runs; None: a program calls the app's functions."""


def _is_idle(variable: str) -> bool:
    return variable in _OF_THE_TERMINAL or variable.startswith(_PREFIXES_OF_THE_TERMINAL)


def socket_path(environment: Mapping[str, str]) -> Path:
    """The socket of the standby of this user for these GPUs, in a folder that only this user can enter.

    Raises OSError for a folder that others can enter.
    """
    folder = Path(tempfile.gettempdir()) / f"plinth-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can enter")
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "all")
    return folder / f"kept-{hashlib.sha256(gpus.encode()).hexdigest()[:8]}"


# ------------------------------------------------------------ the next command


def run_in_kept(command: Command, minutes: float) -> int | None:
    """Lets the standby run the command, and returns its exit code; None if this process has to run it.

    Args:
        minutes: `trainer.keep_servers`; 0 ends a standby, whose servers hold memory of the same GPUs.
    """
    if is_standby():
        return None
    try:
        path = socket_path(os.environ)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
    except OSError:
        if minutes:
            print("trainer.keep_servers: no servers are kept yet", flush=True)
        return None
    with connection, connection.makefile("rb") as answers:
        streams = [stream for stream in range(3) if _is_open(stream)]
        request = {"command": asdict(command), "minutes": minutes, "streams": streams, "umask": _umask()}
        answer: dict[str, Any] = {}
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(connection, [b"+"], streams or [connection.fileno()])
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(answers.readline() or "{}")
        if "pid" not in answer:
            print(f"trainer.keep_servers: {answer.get('why', 'the kept process has ended')}", flush=True)
            answers.read()  # until its servers are gone
            return None
        for number in _PASSED_ON if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, lambda number, _: _pass_on(answer["pid"], number))
        return int(json.loads(answers.readline() or '{"code": 1}')["code"])


def _pass_on(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_open(stream: int) -> bool:
    try:
        os.fstat(stream)
    except OSError:
        return False
    return True


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


# ------------------------------------------------------------ what a run leaves


@dataclass(frozen=True, kw_only=True)
class Left:
    """The servers of a run, and what the standby needs to be ready for the same command."""

    command: Command
    minutes: float
    origin: str
    """The run's folder."""
    servers: Sequence[Any]
    """`ServerProcess`."""
    keys: "SessionKeys"
    devices: "HostDevices"
    """As they were before any process held memory."""
    built: Sequence[Mapping[str, tuple[Any, ...]]]
    """Role -> settings of `TrainerWorker.build`, of each rank group."""


_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from rl_runtime.app.kept import main; main()"


def keep(keys: "SessionKeys", session: "Session", *, run: Path) -> str:
    """Leaves the servers of a run that has ended to a new standby; returns a line for the user."""
    from ..launch.session import last_devices

    command, minutes = COMMAND.get(), keys.trainer.keep_servers
    if command is None:
        return "trainer.keep_servers: nothing is kept, as this program has no command line that could run again"
    with (run / "servers" / "standby.log").open("ab") as log:
        standby = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=command.folder,
            env=command.environment,
            start_new_session=True,
        )
    session.servers.leave_to(standby.pid)
    left = Left(
        command=command,
        minutes=minutes,
        origin=str(run),
        servers=session.servers.servers,
        keys=keys,
        devices=last_devices(),
        built=[group.built for group in session.rank_groups],
    )
    assert standby.stdin is not None
    with standby.stdin as stdin:  # keys of servers reach no file
        pickle.dump(left, stdin)
    standby.returncode = 0  # it outlives this process
    pid = standby.pid
    return f"trainer.keep_servers: process {pid} keeps the servers for {minutes:g} min; kill {pid} ends them"


# ------------------------------------------------------------ the standby

_stage = ""
"""Of a standby: "rehearses" or "runs"."""


class Rehearsed(BaseException):
    """Ends the rehearsal of a run, when it would get its folder."""


def is_standby() -> bool:
    """True in a standby, also while it runs its command."""
    return bool(_stage)


def end_rehearsal() -> None:
    """Ends a rehearsal; does nothing in a run. Raises Rehearsed."""
    if _stage == "rehearses":
        raise Rehearsed


def main() -> None:
    """Keeps the servers that stdin describes until the next command, or until their time is over."""
    from run_kit.signals import signals_as_exceptions

    with signals_as_exceptions(), ExitStack() as stack:
        left: Left = pickle.load(sys.stdin.buffer)
        with open(os.devnull, "rb") as nothing:  # a closed stdin would become the number of another file
            os.dup2(nothing.fileno(), 0)
        path = socket_path(os.environ)
        _end_other(path)
        waiting = stack.enter_context(ExitStack())
        listener = waiting.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        waiting.callback(path.unlink, missing_ok=True)
        listener.listen()
        free_mib = _prepare(left, stack)
        code_state = _state_of_code()
        print(f"standby: ready since {time.strftime('%H:%M:%S')}", flush=True)
        end = time.monotonic() + 60 * left.minutes
        while (remaining := end - time.monotonic()) > 0:
            listener.settimeout(remaining)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                return
            with connection:
                connection.settimeout(10)
                try:
                    request, streams = _read_request(connection)
                    why = _why_not(left, request, free_mib, code_state)
                    _answer(connection, {"why": f"{why}: the kept servers end"} if why else {"pid": os.getpid()})
                except (OSError, ValueError):  # the command has ended
                    continue
                if why:
                    stack.close()  # before the connection, which the command waits for
                    return
                waiting.close()  # the path may be another standby's before this run ends
                connection.settimeout(None)
                for stream, descriptor in streams.items():
                    os.dup2(descriptor, stream)
                    os.close(descriptor)
                print(f"trainer.keep_servers: servers and ranks are kept from {left.origin}", flush=True)
                _answer(connection, {"code": _run(connection, request)})
                return


def _prepare(left: Left, stack: ExitStack) -> list[int]:
    """Rehearses the command, starts its session, and builds its models once; `_free_mib` after that."""
    global _stage
    from rollout_vllm import ServerGroup

    from ..launch.ahead import begun_ahead, keep_servers, sessions_ahead
    from ..launch.session import fix_devices
    from ..ranks.trainer_worker import TrainerWorker

    fix_devices(left.devices)
    stack.enter_context(sessions_ahead())
    endpoints = [server.endpoint for server in left.servers]
    keep_servers(left.keys, ServerGroup(endpoints, left.servers, left.keys.rollout.startup_timeout_s))
    _stage = "rehearses"
    with suppress(Rehearsed):
        INVOKED_AS.set(left.command.invoked_as)
        importlib.import_module(left.command.app).cli(left.command.arguments)
    _stage = "runs"
    (session,) = begun_ahead()
    session.start_ranks()
    for group, built in zip(session.rank_groups, left.built, strict=True):
        for role, settings in built.items():
            group.run(TrainerWorker.build, role, *settings)
            group.run(TrainerWorker.drop, role)
    session.wait_ready()
    return _free_mib(left)


def _free_mib(left: Left) -> list[int]:
    """Free memory of each GPU of the session."""
    from run_kit.machine.gpus import read_gpus

    placement = left.keys.placement
    used = {gpu for slot in (*placement.all_ranks, *placement.servers) for gpu in slot.gpus}
    return [gpu.free_mib or 0 for gpu in read_gpus()[0] if gpu.index in used]


def _why_not(left: Left, request: Mapping[str, Any], free_mib: Sequence[int], code_state: object) -> str:
    """Empty if this process can run the request; else why not."""
    from ..launch.ahead import begun_ahead

    if not request["minutes"]:
        return "it is 0 in this run"
    if not all(server.alive for session in begun_ahead() for server in session.servers.servers):
        return "a kept server has died"
    if any(now < before - _MIB_OF_OTHERS for now, before in zip(_free_mib(left), free_mib, strict=True)):
        return "another program has taken GPU memory"
    if _state_of_code() != code_state:
        return "code or installed packages have changed"
    return left.command.why_not(_command_of(request))


def _command_of(request: Mapping[str, Any]) -> Command:
    fields = dict(request["command"])
    return Command(**fields | {"arguments": tuple(fields["arguments"])})


def _run(connection: socket.socket, request: Mapping[str, Any]) -> int:
    """Runs the command of a request on its streams; returns the exit code."""
    global _received
    _received = command = _command_of(request)
    os.environ.update({name: value for name, value in command.environment.items() if _is_idle(name)})
    os.umask(request["umask"])
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    has_run = threading.Event()
    threading.Thread(target=_end_with, args=(connection, has_run), daemon=True).start()
    INVOKED_AS.set(command.invoked_as)
    try:
        importlib.import_module(command.app).cli(command.arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    has_run.set()  # the command goes when it has the exit code, which does not end the clean-up here
    return code


def _end_with(connection: socket.socket, has_run: threading.Event) -> None:
    """Ends this run when its command is gone before."""
    with suppress(OSError):
        if not connection.recv(1) and not has_run.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def _read_request(connection: socket.socket) -> tuple[dict[str, Any], dict[int, int]]:
    """The request, and its streams: standard stream -> descriptor. Raises OSError or ValueError."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    return request, dict(zip(request["streams"], descriptors, strict=False))


def _answer(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _end_other(path: Path) -> None:
    """Ends a standby for the same GPUs, and removes the socket that a killed one left."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as other:
        other.connect(str(path))
        socket.send_fds(other, [b"+"], [other.fileno()])
        _answer(other, {"minutes": 0, "streams": []})
        other.makefile("rb").read()
    path.unlink(missing_ok=True)


def _state_of_code() -> tuple[object, ...]:
    """Names of the installed releases; time and size of this project's files, and of every module that is neither
    Python's nor installed."""
    own = [
        Path(module.__file__).parent for name in OWN_PACKAGES if (module := sys.modules.get(name)) and module.__file__
    ]
    paths = sysconfig.get_paths()
    installed = tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    loaded = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    files = {file for file in loaded if not str(file).startswith(installed)}
    files |= {file for folder in own for file in folder.rglob("*.py")}
    stats = {file: file.stat() for file in files if file.exists()}
    return (installed_releases(), {file: (stat.st_mtime_ns, stat.st_size) for file, stat in stats.items()})
