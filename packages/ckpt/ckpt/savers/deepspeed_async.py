"""DeepSpeed's own checkpoint, written beside training.

DeepSpeed's `save_checkpoint` gathers state dicts, gives each to its checkpoint engine together with a path, and waits
until it is written. For the time of one call we put ourselves in that engine's place: what it is given is copied to
host memory and nothing is written. The copies are written later, as DeepSpeed would have (`torch.save`, the same files
and names), so that DeepSpeed, its `zero_to_fp32.py` and this package read them alike.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from ..errors import CheckpointSpaceError, CheckpointUsageError
from ..files import is_disk_full
from ..manifest import FileEntry
from .capture import Capture
from .hashed_file import HashedFile
from .host_copying import HostCopying

__all__ = ["DeepSpeedState"]


class DeepSpeedState(Capture):
    """The checkpoint of a DeepSpeed engine, for `AsyncSaver.save`; made once, used by every save.

        actor = DeepSpeedState(engine, lambda folder: engine.save_checkpoint(folder, tag="actor", client_state={...}))
        ...
        saver.save(step, {"actor": actor}, state=...)       # every rank

    The checkpoint then holds `actor/actor/*_states.pt`: what `save_checkpoint(checkpoint / "actor", tag="actor")`
    writes. Host memory holds one copy of this rank's part; it is pinned for a CUDA device, and reused.
    """

    def __init__(self, engine: Any, save: Callable[[str], object]) -> None:
        """`engine` is what `deepspeed.initialize` returned; `save` calls its `save_checkpoint` with the folder given.

        Raises CheckpointUsageError for an optimizer on NVMe, whose files DeepSpeed copies itself.
        """
        if engine.zero_nvme_offload_optimizer():
            raise CheckpointUsageError("an optimizer on NVMe cannot be saved in the background: DeepSpeed copies it")
        self._engine = engine
        self._save = save
        self._copies: dict[str, _HostCopy] = {}
        self._small_files: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the tensors held."""
        return sum(one.num_bytes for one in self._copies.values())

    def take(self) -> None:
        """Call `save` and note what it would have written. DeepSpeed's barriers are in it: every rank calls."""
        original = self._engine.checkpoint_engine
        with tempfile.TemporaryDirectory(prefix="ckpt-deepspeed-") as folder:
            recorder = _Recorder(original, Path(folder), self._copies)
            self._engine.checkpoint_engine = recorder
            try:
                self._save(folder)
            finally:
                self._engine.checkpoint_engine = original
            # What it wrote past its checkpoint engine: zero_to_fp32.py and the name of the tag.
            self._small_files = {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in Path(folder).rglob("*")
                if path.is_file()
            }
        self._copies = {name: self._copies[name] for name in recorder.names}

    def copy(self) -> None:
        """Copy the tensors."""
        for one in self._copies.values():
            one.finish()

    def write(self, folder: Path, name: str) -> Mapping[str, FileEntry]:
        """Write the files below `folder`/`name`, hashed on all cores meanwhile."""
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
                assert file.entry is not None, "it is closed"
                entries[f"{name}/{relative}"] = file.entry
            return entries
        except (OSError, RuntimeError) as error:
            cause: BaseException | None = error
            while cause is not None and not (isinstance(cause, OSError) and is_disk_full(cause)):
                cause = cause.__context__
            if cause is None:
                raise
            raise CheckpointSpaceError(
                f"{path}: {cause.strerror} while the {self.num_bytes:,} bytes of {name!r} were written"
            ) from error


_crc32_guard = threading.Lock()
_num_without_crc32 = 0
_crc32_before = True


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Inside, torch.save leaves out the check sums of its own, on one core, that nobody reads: the manifest has better.

    The switch is the process's; torch.load does not look at them.
    """
    import torch

    global _num_without_crc32, _crc32_before
    options = torch.serialization
    with _crc32_guard:
        if not _num_without_crc32:
            _crc32_before = options.get_crc32_options()
        _num_without_crc32 += 1
        options.set_crc32_options(False)
    try:
        yield
    finally:
        with _crc32_guard:
            _num_without_crc32 -= 1
            if not _num_without_crc32:
                options.set_crc32_options(_crc32_before)


class _Recorder:
    """Takes a checkpoint engine's place: copies what it is to save, asks the real one everything else."""

    def __init__(self, original: Any, folder: Path, copies: dict[str, _HostCopy]) -> None:
        self._original, self._folder, self._copies = original, folder, copies
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create(self, info: Any) -> None:
        """Nothing is to be made."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Only what lies outside the shards is written now."""
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        name = Path(path).relative_to(self._folder).as_posix()
        self.names.append(name)
        self._copies.setdefault(name, _HostCopy()).take(state_dict)

    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        """Whether a view would be saved with all of its storage, so that DeepSpeed had better clone it first."""
        return False


class _HostCopy:
    """A copy of a state dict of any types; its tensors in host memory that the next copy reuses."""

    def __init__(self) -> None:
        self.tree: Any = None
        self._buffers: list[Any] = []
        self._num_used = 0
        self._copying = HostCopying()
        self._seen: dict[tuple[Any, ...], Any] = {}

    @property
    def num_bytes(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._buffers)

    def take(self, tree: Any) -> None:
        """Copies everything but tensors of the host, whose copies `finish` makes."""
        self._num_used = 0
        self._copying = HostCopying()
        self._seen = {}
        self.tree = self._copy(tree)
        del self._buffers[self._num_used :]
        self._seen = {}

    def finish(self) -> None:
        """When it returns, the originals may change."""
        self._copying.finish()

    def _copy(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, dict):
            mapping = copy.copy(value)  # of the same kind, with its attributes
            for key in mapping:
                mapping[key] = self._copy(value[key])
            return mapping
        if isinstance(value, list):
            return type(value)(self._copy(item) for item in value)
        if isinstance(value, tuple):
            items = [self._copy(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Any) -> Any:
        import torch

        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and where in self._seen:
            return self._seen[where]
        index, self._num_used = self._num_used, self._num_used + 1
        if index == len(self._buffers):
            self._buffers.append(None)
        buffer = self._buffers[index] = self._copying.begin(tensor, self._buffers[index])
        copied = torch.nn.Parameter(buffer, tensor.requires_grad) if type(tensor) is torch.nn.Parameter else buffer
        self._seen[where] = copied
        return copied
