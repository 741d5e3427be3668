"""An environment in a process of its own, so that it can block, crash or fork without harm to other samples.

The processes are forked from a server that has imported the environment's module, which takes about 25 ms of CPU time
each. The process and its caller exchange lines of JSON; see `_serve`.
"""

import asyncio
import base64
import copy
import hashlib
import importlib
import inspect
import io
import json
import multiprocessing.util
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from ..errors import RolloutError
from .isolation import enter, limit_memory, receive_listener
from .processes import describe, end_kept, run_kept
from .rewards import read_number

Message = Mapping[str, Any]
"""A chat message: role, content, and what else the chat template reads."""
Observation = str | Sequence[Message] | None

_MAX_LINE_BYTES = 16 * 2**20
_CLOSE_S = 5.0
_STEP_HELP = "allowed: (observation, reward, done, info), or (observation, reward, terminated, truncated, info)"


class EnvironmentFailedError(RolloutError):
    """The environment raised, gave a wrong value, took too long, or its process died. One line says which."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """The class of an environment, its options and its time limits.

    path: `package.module:Class`, whose methods are in docs/environments.md. options: keyword arguments of the class.
    start_timeout_s: seconds to start the process, import the module and make the object. step_timeout_s: seconds of
    `reset` and of every `step`. isolated: the process is shut in (`isolation.enter`). memory_bytes: that it may add.
    image_folder: where images of observations are written, which travel as files. name: for messages. preload: modules
    that it imports later.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    image_folder: str | None = None
    isolated: bool = False
    memory_bytes: int | None = None
    name: str = ""
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of `step`. done: terminated or truncated."""

    observation: Observation
    reward: float | None
    done: bool
    info: dict[str, Any]


class EnvironmentProcess:
    """A running environment. Use it as an async context manager, which starts and ends its process."""

    def __init__(self, spec: EnvironmentSpec, prompt: Any) -> None:
        self._spec, self._prompt = spec, prompt
        self._process: BaseProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_idle = self._is_closing = self._is_over = False
        self._lock = threading.Lock()  # of _process and _is_over
        self._folder = TemporaryDirectory(prefix="plinth-episode-") if spec.isolated else None
        self.listener: socket.socket | None = None  # of an isolated process
        self.tools: list[Message] = []

    async def __aenter__(self) -> Self:
        try:
            ours, theirs = socket.socketpair()
            in_thread = asyncio.get_running_loop().run_in_executor
            starting = in_thread(None, self._start, theirs)
            if self._spec.isolated:
                await asyncio.shield(starting)
                self.listener = await in_thread(None, receive_listener, ours, self._spec.start_timeout_s)
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE_BYTES)
            await asyncio.shield(starting)
            await self._answer("its start", "episode.start_timeout_s", self._spec.start_timeout_s)
        except (asyncio.CancelledError, Exception) as error:
            await self._end()
            if isinstance(error, asyncio.CancelledError | EnvironmentFailedError):
                raise
            raise self._failed(f"cannot be started: {describe(error)}") from error
        return self

    def _start(self, theirs: socket.socket) -> None:
        """Starts the process, in a thread; ends it again if the episode has ended meanwhile."""
        with theirs:
            folder = None if self._folder is None else self._folder.name
            process = _start(self._spec, self._prompt, theirs, folder)
        with self._lock:
            self._process = process
            if not self._is_over:
                return
        end_kept(process)

    async def __aexit__(self, *_: object) -> None:
        with suppress(TimeoutError, OSError, EnvironmentFailedError):
            async with asyncio.timeout(min(_CLOSE_S, self._spec.step_timeout_s)):
                if self._is_idle:
                    await self._send({"close": True})
                if self._is_idle or self._is_closing:  # else it hangs, and cannot close anything
                    await self._read()
        await self._end()

    async def reset(self) -> Observation:
        """The environment's prompt; None to keep that of the data."""
        reply = await self._call({"reset": True}, "reset")
        self.tools = reply["tools"]
        return self._seen(reply["observation"])

    async def step(self, action: str) -> Step:
        """The environment's answer to a turn of the policy."""
        reply = await self._call({"step": action}, "a step")
        return Step(**reply | {"observation": self._seen(reply["observation"])})

    def _seen(self, observation: Any) -> Observation:
        """The observation with files in place of images."""
        for message in observation if isinstance(observation, list) else ():
            for part in parts if isinstance(parts := message.get("content"), list) else ():
                if "image" in part:
                    part["image"] = self._image_file(part["image"])
        seen: Observation = observation
        return seen

    def _image_file(self, image: Any) -> str:
        if isinstance(image, str):
            if self._spec.isolated:
                raise self._failed("an isolated environment gives the bytes of an image, not a path")
            return os.path.abspath(image)
        if self._spec.image_folder is None:
            raise self._failed("an observation has an image, and there is no folder for it")
        content = base64.b64decode(image["base64"])
        path = Path(self._spec.image_folder).absolute() / hashlib.sha256(content).hexdigest()
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            unfinished.write_bytes(content)
            unfinished.replace(path)
        return str(path)

    async def cut(self) -> float | None:
        """Tells the environment that a limit ends the episode. Returns its last reward, if it gives one."""
        reply = await self._call({"cut": True}, "cut")
        reward: float | None = reply["reward"]
        return reward

    async def _call(self, message: Mapping[str, Any], action: str) -> dict[str, Any]:
        self._is_idle = False
        await self._send(message)
        return await self._answer(action, "episode.step_timeout_s", self._spec.step_timeout_s)

    async def _send(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    async def _answer(self, action: str, key: str, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._read()
        except TimeoutError:
            raise self._failed(f"{action} took longer than {key}={timeout_s:g}") from None
        if "error" in reply:
            self._is_closing = True
            raise self._failed(reply["error"])
        self._is_idle = True
        return reply

    async def _read(self) -> dict[str, Any]:
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except ValueError:
            raise self._failed(f"returned more than {_MAX_LINE_BYTES // 2**20} MiB") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._failed(f"its process died{await asyncio.to_thread(self._exit_code)}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _exit_code(self) -> str:
        assert self._process is not None
        self._process.join(timeout=_CLOSE_S)
        return "" if self._process.exitcode is None else f" (exit code {self._process.exitcode})"

    def _failed(self, why: str) -> EnvironmentFailedError:
        return EnvironmentFailedError(f"{self._spec.name or f'environment {self._spec.path}'}: {why}")

    async def _end(self) -> None:
        """Ends the process and all that it has started, even if this coroutine is cancelled."""
        if self._writer is not None:
            self._writer.close()
        with self._lock:
            self._is_over = True
            process = self._process
        if process is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, end_kept, process))
        if self.listener is not None:
            self.listener.close()
        if self._folder is not None:
            self._folder.cleanup()


def _start(spec: EnvironmentSpec, prompt: Any, theirs: socket.socket, folder: str | None) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    shorten_socket_paths()
    modules = ["__main__", __name__, *modules_of(spec.path), *spec.preload, *_imported_by_main()]
    context.set_forkserver_preload(modules)  # before the first start only
    work = partial(_serve, spec.path, dict(spec.options), prompt, spec.memory_bytes, folder)
    process = context.Process(target=run_kept, args=(work, theirs), daemon=True)
    process.start()
    return process


def shorten_socket_paths() -> None:
    """Puts multiprocessing's sockets below /tmp if those below TMPDIR would have more than the 107 bytes of Linux."""
    with _choosing_folder:
        before = tempfile.tempdir
        if len(os.fsencode(tempfile.gettempdir())) > 107 - len("/pymp-12345678/listener-12345678"):
            tempfile.tempdir = "/tmp"
        multiprocessing.util.get_temp_dir()  # it is chosen once in a process
        tempfile.tempdir = before


_choosing_folder = threading.Lock()


def modules_of(path: str) -> list[str]:
    """The module of a class or function, and those that it names in its attribute `preload`."""
    module = path.partition(":")[0]
    environment = getattr(sys.modules.get(module), path.partition(":")[2], None)
    return [module, *getattr(environment, "preload", ())]


def _imported_by_main() -> list[str]:
    """The modules from which `__main__` has names.

    multiprocessing imports `__main__` in every process. Preloading `__main__` itself has no effect up to Python 3.12
    (python/cpython issue 126631). With these preloaded, a process of the GRPO app takes 25 instead of 260 ms.
    """
    values = vars(sys.modules["__main__"]).values()
    names = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in values}
    return sorted(name for name in names if isinstance(name, str) and name in sys.modules and name != "__main__")


# ---- the process -----------------------------------------------------------------------------------------------------
def _serve(
    path: str, options: dict[str, Any], prompt: Any, memory_bytes: int | None, folder: str | None, pipe: socket.socket
) -> None:
    """Main loop of the process, which is shut in if it has a folder of its own.

    One line of JSON is read and one is written at a time.

    It starts with {}. {"reset"} is answered by {"observation", "tools"}, {"step": action} by the fields of `Step`,
    {"cut"} by {"reward"}, {"close"} by {}; an error by {"error"}, after which the process ends, as at the end of the
    input.
    """
    # What an environment prints is discarded: with hundreds of them it would bury the run's own lines.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    denied = None
    if folder is not None:
        try:
            enter(pipe, folder)
        except OSError as error:
            denied = error
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    file, own = pipe.makefile("rw", encoding="utf-8", newline="\n"), os.getpid()

    def write(reply: Mapping[str, Any]) -> None:
        if os.getpid() != own:  # the environment has forked, and its copy goes on here
            os._exit(0)
        file.write(json.dumps(reply) + "\n")
        file.flush()

    with asyncio.Runner() as runner:
        environment: Any = None
        try:
            if denied is not None:
                raise denied
            environment = _load(path)(**options)
            write({})
            for line in file:
                message = json.loads(line)
                if "close" in message:
                    break
                write(_reply(message, environment, prompt, runner))
        except BaseException as error:  # sys.exit in an environment is an error like others
            write({"error": describe(error)})
        if (close := getattr(environment, "close", None)) is not None:
            _result(close, runner)
        write({})


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    environment: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return environment


def _reply(message: Mapping[str, Any], environment: Any, prompt: Any, runner: asyncio.Runner) -> dict[str, Any]:
    if "reset" in message:
        opening = _result(environment.reset, runner, prompt)
        if isinstance(opening, tuple) and len(opening) == 2:  # gymnasium's (observation, info)
            opening = opening[0]
        tools = _messages(getattr(environment, "tools", None) or [], "tools")
        return {"observation": _observation(opening, "reset()"), "tools": tools}
    if "cut" in message:
        cut = getattr(environment, "cut", None)
        return {"reward": None if cut is None else _reward(_result(cut, runner), "cut()")}
    return _step(_result(environment.step, runner, message["step"]))


def _result(function: Callable[..., Any], runner: asyncio.Runner, *args: Any) -> Any:
    """The result of a function or coroutine function."""
    result = function(*args)

    async def wait() -> Any:
        return await result

    return runner.run(wait()) if inspect.isawaitable(result) else result


def _step(result: Any) -> dict[str, Any]:
    """The values of `Step`."""
    if not isinstance(result, tuple) or len(result) not in (4, 5):
        raise TypeError(f"step() returned {_shown(result)}; {_STEP_HELP}")
    observation, reward, *ends, info = result
    return {
        "observation": _observation(observation, "step()"),
        "reward": _reward(reward, "step()"),
        "done": any(map(bool, ends)),
        "info": json.loads(json.dumps(info, default=str)) if isinstance(info, dict) else {},
    }


def _reward(value: Any, method: str) -> float | None:
    try:
        return None if value is None else read_number(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{method}: {error}") from None


def _observation(value: Any, method: str) -> Observation:
    return value if value is None or isinstance(value, str) else _messages(value, method)


def _messages(value: Any, source: str) -> list[Message]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise TypeError(f"{source} returned {_shown(value)}; allowed: text, a list of messages, or None")
    return [_with_bytes(copy.deepcopy(dict(item))) for item in value]


def _with_bytes(message: dict[str, Any]) -> Message:
    """The message with base64 in place of the images (PIL's, or bytes of an image file) of its parts."""
    for part in parts if isinstance(parts := message.get("content"), list) else ():
        if (image := part.get("image")) is None or isinstance(image, str):
            continue
        if not isinstance(image, bytes):
            with io.BytesIO() as buffer:
                image.save(buffer, "PNG")
                image = buffer.getvalue()
        part["image"] = {"base64": base64.b64encode(image).decode("ascii")}
    return message


def _shown(value: Any) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})"
