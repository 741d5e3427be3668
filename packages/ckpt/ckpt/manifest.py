"""The manifest of a checkpoint: the name, size and checksum of every file, and a checksum of the manifest itself.

Formats: 1 has the plain SHA-256 of every file. 2 adds `chunk_bytes`, by which `digest` computes checksums on several
threads, and `packages`. This version writes 2 and reads both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from .digest import CHUNK_BYTES, hash_files
from .errors import CheckpointUsageError, UnsupportedFormatError
from .files import fsync_file, partial_name, walk_files
from .threads import Pool

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "FileEntry", "Manifest", "ManifestError", "Problem", "verify_folder"]

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
#: Files forced to the disk at a time.
_NUM_FSYNCS = 8


class ManifestError(Exception):
    """A manifest is missing, torn or altered. Internal: callers turn it into a Problem."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum (see `digest`) of one file."""

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
    chunk_bytes: int | None = CHUNK_BYTES
    """By which the files' checksums were computed; None: plain SHA-256."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What `publish` was told the checkpoint is worth; retention of the best goes by it."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages of the process that published it, by name."""

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
        packages: Mapping[str, str] | None = None,
        entries: Mapping[str, FileEntry] | None = None,
    ) -> Manifest:
        """Hash every file in `folder` and force it to the disk; those in `entries` are not read.

        Raises CheckpointUsageError for a symbolic link, and for an entry without its file or of another size.
        """
        # An earlier try at publishing may have left a manifest, or half of one.
        own = {folder / MANIFEST_NAME, partial_name(folder / MANIFEST_NAME)}
        paths = {path.relative_to(folder).as_posix(): path for path in walk_files(folder) if path not in own}
        for name, path in paths.items():
            if path.is_symlink() or not path.is_file():
                raise CheckpointUsageError(
                    f"{name}: is not a regular file. A checkpoint must hold its bytes itself; copy the file instead "
                    "of linking it."
                )
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        known = entries or {}
        for name, entry in known.items():
            if sizes.get(name) != entry.num_bytes:
                raise CheckpointUsageError(f"{name}: is not there with the {entry.num_bytes} bytes of its entry")
        found = describe_files({name: paths[name] for name in sizes if name not in known})
        # Entries say what the files hold, not that they have reached the disk.
        fsync_files([paths[name] for name in known])
        return cls(
            step=step,
            created_at=created_at,
            files={name: known.get(name) or found[name] for name in paths},
            metrics=metrics or {},
            packages=packages or {},
        )

    def to_json(self) -> str:
        """The manifest file's text; the last field is the SHA-256 of the rest."""
        body: dict[str, Any] = {
            "format_version": self.format_version,
            "step": self.step,
            "created_at": self.created_at,
            "files": {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in self.files.items()},
        }
        if self.chunk_bytes is not None:
            body["chunk_bytes"] = self.chunk_bytes
        if self.metrics:
            body["metrics"] = dict(self.metrics)
        if self.packages:
            body["packages"] = dict(self.packages)
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
            chunk_bytes=body.get("chunk_bytes"),
            metrics=body.get("metrics", {}),
            packages=body.get("packages", {}),
        )


def _body_checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def fsync_files(paths: Sequence[Path]) -> None:
    """Force files to the disk, several at a time."""
    with Pool(_NUM_FSYNCS) as pool:
        for done in [pool.submit(fsync_file, path) for path in paths]:
            done.result()


def describe_files(paths: Mapping[str, Path]) -> dict[str, FileEntry]:
    """Size and checksum of files under the names given, forced to the disk while they are hashed.

    Every rank can call it for the files it wrote and hand the result to the process that publishes, as `entries`: then
    the ranks' machines hash side by side, each out of its own memory.
    """
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    with Pool(1) as pool:  # the disk works while the processors hash what is still in memory
        flushed = pool.submit(fsync_files, list(paths.values()))
        checksums = hash_files([(paths[name], sizes[name]) for name in sizes])
        flushed.result()
    entries = {}
    for name, checksum in zip(sizes, checksums, strict=True):
        if isinstance(checksum, OSError):
            raise checksum
        entries[name] = FileEntry(num_bytes=sizes[name], sha256=checksum)
    return entries


def check_files(
    folder: Path, manifest: Manifest, names: Iterable[str], *, on_read: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compare files of a checkpoint with its manifest; `on_read` is told bytes as they are read, from any thread."""
    problems: dict[str, Problem] = {}
    whole: list[str] = []
    wanted = list(names)
    for name in wanted:
        entry = manifest.files[name]
        try:
            num_bytes = (folder / name).stat().st_size
        except FileNotFoundError:
            problems[name] = Problem(file=name, kind="missing", detail=f"published with {entry.num_bytes} bytes")
        except OSError as error:
            problems[name] = Problem(file=name, kind="unreadable", detail=str(error))
        else:
            if num_bytes == entry.num_bytes:
                whole.append(name)
            else:
                detail = f"{num_bytes} bytes, published with {entry.num_bytes}"
                problems[name] = Problem(file=name, kind="torn", detail=detail)
    files = [(folder / name, manifest.files[name].num_bytes) for name in whole]
    checksums = hash_files(files, chunk_bytes=manifest.chunk_bytes, on_read=on_read)
    for name, checksum in zip(whole, checksums, strict=True):
        if isinstance(checksum, OSError):
            problems[name] = Problem(file=name, kind="unreadable", detail=str(checksum))
        elif checksum != manifest.files[name].sha256:
            problems[name] = Problem(file=name, kind="altered", detail="SHA-256 differs from the published one")
    return [problems[name] for name in wanted if name in problems]


def verify_folder(folder: Path, *, on_read: Callable[[int, int], None] | None = None) -> tuple[Problem, ...]:
    """Read every file of a published checkpoint and report what differs from its manifest; empty when all is well.

    `on_read` is told the bytes just read and the bytes of all files, from whatever thread read them.
    Files that the manifest does not name are ignored: tools may leave notes or conversions beside a checkpoint.
    """
    try:
        manifest = Manifest.read(folder)
    except ManifestError as error:
        kind: Literal["missing", "altered"] = "altered" if (folder / MANIFEST_NAME).exists() else "missing"
        return (Problem(file=MANIFEST_NAME, kind=kind, detail=str(error)),)

    def tell(num_bytes: int) -> None:
        if on_read is not None:
            on_read(num_bytes, manifest.num_bytes)

    return tuple(check_files(folder, manifest, manifest.files, on_read=tell))
