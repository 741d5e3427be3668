"""Sessions whose processes start before their run has a folder: while its checks continue, or before there is a run."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_vllm import RolloutConfig, ServerGroup

from ..config import TrainerConfig
from .placement import Placement

if TYPE_CHECKING:
    from .session import Session

_ahead: "list[SessionAhead]" = []
_kept: "list[tuple[SessionKeys, ServerGroup]]" = []


@dataclass(frozen=True, kw_only=True)
class SessionKeys:
    """Everything that the processes of a session depend on: runs with equal keys can use the same session."""

    trainer: TrainerConfig = field(compare=False)
    """`ranks` has the part that counts."""
    placement: Placement
    rollout: RolloutConfig
    model_path: str
    model_files: tuple[tuple[str, int, int], ...]
    """Name, bytes and time of change of each file of the model's folder."""
    ranks: tuple[float, ...]

    @classmethod
    def of(cls, placement: Placement, trainer: TrainerConfig, rollout: RolloutConfig, model_path: str) -> "SessionKeys":
        """The keys of a run whose servers load the folder `model_path`."""
        files = [(path.name, path.stat()) for path in sorted(Path(model_path).iterdir())]
        return cls(
            trainer=trainer,
            placement=placement,
            rollout=rollout,
            model_path=model_path,
            model_files=tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files),
            ranks=(trainer.cpu_threads_per_rank, trainer.step_timeout_s, trainer.stall_timeout_s),
        )

    def differing(self, other: "SessionKeys") -> list[str]:
        """Names of the keys that differ."""
        names = []
        for own in fields(self):
            mine, theirs = getattr(self, own.name), getattr(other, own.name)
            if own.name == "rollout":
                keys = [one.name for one in fields(mine) if getattr(mine, one.name) != getattr(theirs, one.name)]
                names += [f"rollout.{key}" for key in keys]
            elif own.compare and mine != theirs:
                names.append(own.name)
        return names


class SessionAhead:
    """A session that has begun; entering it yields the session, whose processes end at the end of the block."""

    def __init__(
        self, keys: SessionKeys, begin: Callable[[Path], AbstractContextManager["Session"]], folder: Path
    ) -> None:
        """`begin`: begins the session with a folder for logs; `folder`: where that of the logs is made."""
        self.keys = keys
        with ExitStack() as stack:
            logs = Path(tempfile.mkdtemp(prefix=".plinth-starting-", dir=folder))
            stack.callback(shutil.rmtree, logs, ignore_errors=True)
            check_links(logs)
            self.session = stack.enter_context(begin(logs))
            self._stack = stack.pop_all()

    def __enter__(self) -> "Session":
        return self.session

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def check_links(folder: Path) -> None:
    """Raises OSError for a file system without hard links, through which logs get to the run folder."""
    probe = folder / "probe"
    probe.touch()
    os.link(probe, folder / "link")


_allowed = ContextVar("_allowed", default=False)


@contextmanager
def sessions_ahead() -> Iterator[None]:
    """Allows sessions to begin ahead; ends at the end of the block those that no run has taken."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)
        while _ahead:
            _ahead.pop().__exit__()
        while _kept:
            _kept.pop()[1].stop()


def begin_ahead(keys: SessionKeys, begin: Callable[[Path], AbstractContextManager["Session"]], folder: Path) -> None:
    """Begins a session for a run that will ask for these keys; does nothing outside of `sessions_ahead`, if there is
    one, or if `folder` cannot hold logs."""
    if not _allowed.get() or any(one.keys == keys for one in _ahead):
        return
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    with suppress(OSError):
        _ahead.append(SessionAhead(keys, begin, existing))


def take_ahead(keys: SessionKeys) -> tuple[SessionAhead | None, list[str]]:
    """The session with these keys, which the caller owns from now on, and the keys in which other sessions differ.

    The other sessions end.
    """
    taken, differing = None, list[str]()
    while _ahead:
        one = _ahead.pop()
        if names := one.keys.differing(keys):
            one.__exit__()
            differing += names
        else:
            taken = one
    return taken, differing


def begun_ahead() -> "list[Session]":
    """The sessions that wait for their run."""
    return [one.session for one in _ahead]


def keep_servers(keys: SessionKeys, servers: ServerGroup) -> None:
    """Offers servers of a former run to the next session with these keys."""
    _kept.append((keys, servers))


def take_servers(keys: SessionKeys) -> ServerGroup | None:
    """The kept servers, for a session with these keys; ends them for another one."""
    while _kept:
        kept, servers = _kept.pop()
        if kept == keys:
            return servers
        servers.stop()
    return None
