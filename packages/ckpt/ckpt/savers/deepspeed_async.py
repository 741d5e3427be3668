"""Saves DeepSpeed's own checkpoint in the background.

DeepSpeed's `save_checkpoint` gathers state dicts and passes each to its checkpoint engine, which writes it to a path.
During one call this module replaces that engine: it copies the state dicts to host memory and writes nothing. A
background thread later writes the copies as DeepSpeed does (`torch.save`, the same files and names), so DeepSpeed, its
`zero_to_fp32.py` and this package can all read them.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, cast

from ..digest import FileEntry, HashedFile
from ..errors import CheckpointUsageError
from ..files import is_disk_full, no_space
from ..upstream import FENCE
from .capture import Capture, HostTree

ENGINE = FENCE.patch(
    name="background saves of DeepSpeed's checkpoint",
    reason="DeepSpeed writes during the call; its checkpoint engine is where all state dicts pass",
    otherwise="refused",
    replaces={"deepspeed.runtime.engine:DeepSpeedEngine": ("checkpoint_engine",)},
    reads={
        "deepspeed.runtime.engine:DeepSpeedEngine": ("zero_nvme_offload_optimizer()",),
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine": (
            *("create(info)", "makedirs(path, exist_ok)", "save(state_dict, path)", "commit(info)"),
            *("is_decoupled()", "preserves_storage_sharing()"),
        ),
    },
)


class DeepSpeedState(Capture):
    """The checkpoint of a DeepSpeed engine, for `AsyncSaver.save`; one object serves all saves.

        actor = DeepSpeedState(engine, lambda folder: engine.save_checkpoint(folder, tag="actor", client_state={...}))
        ...
        saver.save(step, {"actor": actor}, state=...)       # every rank

    The checkpoint then holds `actor/actor/*_states.pt`, the files that `save_checkpoint(checkpoint / "actor",
    tag="actor")` writes. Host memory holds one copy of this rank's part, pinned for a CUDA device; all saves reuse it.
    """

    def __init__(self, engine: Any, save: Callable[[str], object]) -> None:
        """`engine` is the engine from `deepspeed.initialize`; `save(folder)` calls its `save_checkpoint(folder)`.

        Raises CheckpointUsageError for an optimizer on NVMe, whose files DeepSpeed copies itself, and for a DeepSpeed
        whose checkpoint engine is not the tested one.
        """
        if "deepspeed" in sys.modules:  # otherwise the engine is not DeepSpeed's
            ENGINE.check()
        if engine.zero_nvme_offload_optimizer():
            raise CheckpointUsageError("cannot save an optimizer on NVMe in the background: DeepSpeed copies its files")
        self._engine = engine
        self._save = save
        self._copies = dict[str, HostTree]()
        self._small_files: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the copied tensors in bytes."""
        return sum(one.num_bytes for one in self._copies.values())

    def take(self) -> None:
        """Call `save` and record its state dicts. It contains DeepSpeed's barriers, so every rank must call it."""
        with tempfile.TemporaryDirectory(prefix="ckpt-deepspeed-") as folder:
            recorder = _Recorder(self._engine.checkpoint_engine, Path(folder), self._copies)
            restore = ENGINE.replace(self._engine, checkpoint_engine=recorder)
            try:
                self._save(folder)
            finally:
                restore()
            if not recorder.names:
                raise CheckpointUsageError("nothing was saved: `save` must call this engine's save_checkpoint")
            # Files that DeepSpeed writes without its checkpoint engine: zero_to_fp32.py and `latest`.
            self._small_files = {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in Path(folder).rglob("*")
                if path.is_file()
            }
        self._copies = {name: self._copies[name] for name in recorder.names}

    def copy(self) -> None:
        """Copy the host tensors and wait for the devices."""
        for one in self._copies.values():
            one.copy()

    def write(self, folder: Path, name: str) -> Mapping[str, FileEntry]:
        """Write the files below `folder`/`name`; they are hashed while they are written."""
        import torch

        entries: dict[str, FileEntry] = {}
        try:
            for relative in (*self._small_files, *self._copies):
                path = folder / name / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                with HashedFile(path) as file:
                    if relative in self._small_files:
                        file.write(self._small_files[relative])
                    else:
                        with _without_crc32():
                            torch.save(self._copies[relative].tree, cast("IO[bytes]", file))
                entries[f"{name}/{relative}"] = file.entry
            return entries
        except (OSError, RuntimeError) as error:
            cause: BaseException | None = error
            while cause is not None and not (isinstance(cause, OSError) and is_disk_full(cause)):
                cause = cause.__context__
            if cause is None:
                raise
            raise no_space(cause, path, f"the {self.num_bytes:,} bytes of {name!r} were written") from error


def _without_crc32() -> AbstractContextManager[None]:
    """Disables torch.save's CRC32 inside: it runs on one core, and the manifest holds better checksums.

    The option is process-wide. torch.load does not check the CRC32.
    """
    from torch.utils.serialization import config

    patched: AbstractContextManager[None] = config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
    return patched


class _Recorder:
    """Replaces a checkpoint engine: copies the state dicts it is given, forwards everything else to the original."""

    def __init__(self, original: Any, folder: Path, copies: dict[str, HostTree]) -> None:
        self._original, self._folder, self._copies = original, folder, copies
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create(self, info: Any) -> None:
        """Does nothing: no files are written during the call."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        # For the files that DeepSpeed writes itself.
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        name = Path(path).relative_to(self._folder).as_posix()
        self.names.append(name)
        ENGINE.calls["checkpoint_engine"] += 1
        self._copies.setdefault(name, HostTree()).take(state_dict)

    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        """False: DeepSpeed need not clone views, since only their own elements are copied."""
        return False
