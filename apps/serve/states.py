"""Saved states and sampler weights on disk, and their `tinker://` paths.

<api.states_dir>/
  <run>/run.json                     model and adapters of a training client
  <run>/weights/<name>/              a checkpoint: weights and optimizer
  <run>/sampler_weights/<name>/      a Hugging Face folder
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckpt import Checkpoint
from ckpt.reader import CheckpointReader
from rl_runtime import InputError
from rl_runtime.rules import check_value
from run_kit.tracking.metrics_table import atomic_write

Kind = Literal["weights", "sampler_weights"]
_PATH = re.compile(r"tinker://([\w:.-]+)/(weights|sampler_weights)/([\w.=+-]{1,128})")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Model and adapters of a training client; JSON-able."""

    run_id: str
    base_model: str
    lora: dict[str, Any] | None
    """Rank and layers of the adapters; None: all weights."""
    user_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved state or sampler weights."""

    run_id: str
    kind: Kind
    name: str
    folder: Path

    @property
    def uri(self) -> str:
        """The path that clients know."""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    def describe(self) -> dict[str, Any]:
        """The SDK's `Checkpoint`."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.folder.stat().st_mtime))
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": "training" if self.kind == "weights" else "sampler",
            "time": moment,
            "tinker_path": self.uri,
            "size_bytes": sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()),
        }


class States:
    """The folder of saved states."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def add_run(self, run: Run) -> None:
        """Writes down what a new client trains."""
        folder = self._folder(run.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / "run.json", json.dumps(asdict(run), indent=1) + "\n")

    def run(self, run_id: str) -> Run:
        """Raises InputError for a run that is unknown here."""
        try:
            return Run(**json.loads((self._folder(run_id) / "run.json").read_text()))
        except OSError as error:
            raise InputError("no such run", field="training_run_id", value=run_id) from error

    def runs(self) -> list[Run]:
        """All runs, the newest first."""
        files = sorted(self.root.glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        return [Run(**json.loads(path.read_text())) for path in files]

    def new(self, run_id: str, kind: Kind, name: str, *, overwrite: bool = False) -> Saved:
        """A new place under this name. Raises InputError for a name that is taken, or cannot be a folder's."""
        uri = f"tinker://{run_id}/{kind}/{name}"
        if not _PATH.fullmatch(uri) or name.strip(".") == "":
            raise InputError(field="name", value=name, allowed="letters, digits and _ . = + -")
        folder = self._folder(run_id) / kind / name
        check_value({"name": name}, "name", overwrite or not folder.exists(), "a new name, or overwrite=True")
        return Saved(run_id=run_id, kind=kind, name=name, folder=folder)

    def unnamed_folder(self, run_id: str, version: str) -> Path:
        """A folder of weights of a run that no client can name."""
        return self._folder(run_id) / "sampler_weights" / f".version_{version.rpartition(':')[2]}"

    def find(self, uri: str, kind: Kind) -> Saved:
        """The state or weights at a path. Raises InputError for a path of another form or kind, or of nothing."""
        match = _PATH.fullmatch(uri)
        if match is None or match[2] != kind or match[3].strip(".") == "":
            raise InputError(field="path", value=uri, allowed=f"tinker://RUN/{kind}/NAME")
        saved = Saved(run_id=match[1], kind=kind, name=match[3], folder=self._folder(match[1]) / kind / match[3])
        if not saved.folder.is_dir():
            raise InputError("nothing is saved there", field="path", value=uri)
        return saved

    def saved(self, run_id: str) -> Iterator[Saved]:
        """Everything saved of a run."""
        for kind in ("weights", "sampler_weights"):
            for folder in sorted((self._folder(run_id) / kind).glob("*")):
                if not folder.name.startswith("."):
                    yield Saved(run_id=run_id, kind=kind, name=folder.name, folder=folder)

    def _folder(self, run_id: str) -> Path:
        if not re.fullmatch(r"[\w:.-]+", run_id) or run_id.strip(".") == "":
            raise InputError(field="training_run_id", value=run_id, allowed="the id of a run")
        return self.root / run_id.replace(":", "_")


def load_state(saved: Saved) -> Checkpoint:
    """The newest checkpoint saved under this name; every file is verified.

    Raises InputError if there is none, or CheckpointError if it is damaged.
    """
    reader = CheckpointReader(saved.folder)
    if not reader.steps():
        raise InputError("no whole checkpoint is there", field="path", value=saved.uri)
    return reader.load(max(reader.steps()))
