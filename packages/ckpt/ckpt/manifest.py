"""The manifest of a checkpoint: the name, size and SHA-256 of every file, and a checksum of the manifest itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from .errors import CheckpointUsageError, UnsupportedFormatError
from .files import fsync_file, hash_file, partial_name, walk_files

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "FileEntry", "Manifest", "ManifestError", "Problem", "verify_folder"]

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
#: Writing, reading and hashing overlap across files; more threads than this find the disk busy already.
_MAX_THREADS = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ManifestError(Exception):
    """A manifest is missing, torn or altered. Internal: callers turn it into a Problem."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with one file of a checkpoint.

    `missing`: it is not there; `torn`: its size differs; `altered`: its size is right, its bytes are not;
    `unreadable`: the system refused to read it.
    """

    file: str
    kind: Literal["missing", "torn", "altered", "unreadable"]
    detail: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} ({self.detail})"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a published checkpoint consists of."""

    step: int
    created_at: str
    """UTC, ISO 8601."""
    files: Mapping[str, FileEntry]
    """By path relative to the checkpoint, with forward slashes."""
    format_version: int = FORMAT_VERSION
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What `publish` was told the checkpoint is worth; retention of the best goes by it."""

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(entry.num_bytes for entry in self.files.values())

    @classmethod
    def describe(
        cls,
        folder: Path,
        *,
        step: int,
        created_at: str,
        metrics: Mapping[str, float] | None = None,
        entries: Mapping[str, FileEntry] | None = None,
    ) -> Manifest:
        """Hash every file in `folder` and force it to the disk; those in `entries` are taken as described there.

        Raises CheckpointUsageError for a symbolic link, and for an entry without its file or of another size.
        """
        known = entries or {}
        # An earlier try at publishing may have left a manifest, or half of one.
        own = {folder / MANIFEST_NAME, partial_name(folder / MANIFEST_NAME)}
        paths = [path for path in walk_files(folder) if path not in own]
        for path in paths:
            if path.is_symlink() or not path.is_file():
                raise CheckpointUsageError(
                    f"{path.relative_to(folder)}: is not a regular file. A checkpoint must hold its bytes itself; "
                    "copy the file instead of linking it."
                )

        for name, entry in known.items():
            if folder / name not in paths or (folder / name).stat().st_size != entry.num_bytes:
                raise CheckpointUsageError(f"{name}: is not there with the {entry.num_bytes} bytes of its entry")

        def describe_file(path: Path) -> tuple[str, FileEntry]:
            if (name := path.relative_to(folder).as_posix()) in known:
                return name, known[name]
            entry = FileEntry(num_bytes=path.stat().st_size, sha256=hash_file(path))
            return path.relative_to(folder).as_posix(), entry

        # The disk works while the processor hashes what is still in memory.
        tasks: list[tuple[Callable[[Path], tuple[str, FileEntry] | None], Path]]
        tasks = [(task, path) for path in paths for task in (fsync_file, describe_file)]
        results = _parallel(lambda item: item[0](item[1]), tasks)
        files = dict(result for result in results if result is not None)
        return cls(step=step, created_at=created_at, files=files, metrics=metrics or {})

    def to_json(self) -> str:
        """The manifest file's text; the last field is the SHA-256 of the rest."""
        body: dict[str, Any] = {
            "format_version": self.format_version,
            "step": self.step,
            "created_at": self.created_at,
            "files": {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in self.files.items()},
        }
        if self.metrics:
            body["metrics"] = dict(self.metrics)
        return json.dumps({**body, "manifest_sha256": _body_checksum(body)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder.

        Raises ManifestError when it is missing, torn or altered, UnsupportedFormatError when it is of a newer format.
        """
        try:
            text = (folder / MANIFEST_NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ManifestError("missing") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(f"cannot be read: {error}") from error
        try:
            body = json.loads(text)
            checksum = body.pop("manifest_sha256")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ManifestError("is not a complete manifest") from error
        version = body.get("format_version")
        # Before the checksum: a newer format may compute it otherwise.
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{folder}: has checkpoint format {version}; this version of plinth-ckpt reads formats up to "
                f"{FORMAT_VERSION}. Install a newer plinth-ckpt."
            )
        if checksum != _body_checksum(body):
            raise ManifestError("does not match its own checksum")
        files = {
            name: FileEntry(num_bytes=entry["bytes"], sha256=entry["sha256"]) for name, entry in body["files"].items()
        }
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ManifestError(f"names a file outside the checkpoint: {name}")
        return cls(
            step=body["step"],
            created_at=body["created_at"],
            files=files,
            format_version=version,
            metrics=body.get("metrics", {}),
        )


def _body_checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _parallel(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """`function` of every item, in order, on threads. Raises what the first failing one raised."""
    waiting = list(items)
    try:
        with ThreadPoolExecutor(min(_MAX_THREADS, 2 * (os.cpu_count() or 1))) as pool:
            futures = [pool.submit(function, item) for item in waiting]
    except RuntimeError:
        # A save may outlive the main thread, and an interpreter on its way out starts no threads.
        return [function(item) for item in waiting]
    return [future.result() for future in futures]


def check_file(folder: Path, name: str, entry: FileEntry) -> Problem | None:
    """Compare one file with its manifest entry; None when it is as published."""
    path = folder / name
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            return Problem(file=name, kind="torn", detail=f"{num_bytes} bytes, published with {entry.num_bytes}")
        if hash_file(path) != entry.sha256:
            return Problem(file=name, kind="altered", detail="SHA-256 differs from the published one")
    except FileNotFoundError:
        return Problem(file=name, kind="missing", detail=f"published with {entry.num_bytes} bytes")
    except OSError as error:
        return Problem(file=name, kind="unreadable", detail=str(error))
    return None


def verify_folder(folder: Path, *, on_file: Callable[[int, int], None] | None = None) -> tuple[Problem, ...]:
    """Read every file of a published checkpoint and report what differs from its manifest; empty when all is well.

    `on_file` is told the bytes of each file that has been read and of all files, from whatever thread read it.
    Files that the manifest does not name are ignored: tools may leave notes or conversions beside a checkpoint.
    """
    try:
        manifest = Manifest.read(folder)
    except ManifestError as error:
        kind: Literal["missing", "altered"] = "altered" if (folder / MANIFEST_NAME).exists() else "missing"
        return (Problem(file=MANIFEST_NAME, kind=kind, detail=str(error)),)

    def check(item: tuple[str, FileEntry]) -> Problem | None:
        found = check_file(folder, *item)
        if on_file is not None:
            on_file(item[1].num_bytes, manifest.num_bytes)
        return found

    results = _parallel(check, manifest.files.items())
    return tuple(problem for problem in results if problem is not None)
