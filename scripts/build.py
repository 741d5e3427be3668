"""Builds the wheel and the sdist of every package into dist/, with the same bytes from the same commit.

    python scripts/build.py [--out DIR] [FOLDER ...]    packages/rl_core, apps, ...; no folder: all of them

It copies the tracked files of a folder, gives them one time (`SOURCE_DATE_EPOCH`, or the time of the last commit), and
calls setuptools there with warnings as errors. An sdist also has the package's tests, examples and changes.
The bytes also depend on the version of setuptools; 3rdparty/cpu.txt pins it.
"""

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# Setuptools sets sys.argv.
_BACKEND = "import sys, setuptools.build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"
_ALSO_IN_SDIST = "graft tests\ngraft examples\ninclude CHANGELOG.md\nglobal-exclude *.py[co]\n"


def projects() -> list[Path]:
    """The folders with a distribution of their own."""
    return sorted(path.parent for path in [*REPO.glob("packages/*/pyproject.toml"), REPO / "apps" / "pyproject.toml"])


def name_and_version(folder: Path) -> tuple[str, str]:
    """The project's name and version."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["name"], project["version"]


def build(folder: Path, out: Path, epoch: int) -> list[Path]:
    """Build the sdist and the wheel of `folder` into `out`.

    Args:
        epoch: the time of every file in them, in seconds since 1970.

    Raises:
        RuntimeError: the build failed or printed a warning of Python.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        stage = Path(temporary) / folder.name
        _copy_tracked(folder, stage, epoch)
        before = set(out.iterdir())
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONPATH": ""}
        command = [sys.executable, "-W", "error", "-c", _BACKEND, str(out.resolve())]
        done = subprocess.run(command, cwd=stage, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"{folder.relative_to(REPO)} cannot be built:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
    name, version = name_and_version(folder)
    stem = f"{name.replace('-', '_')}-{version}"
    built = [out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"]
    assert set(out.iterdir()) == before | set(built)
    _repack(built[0], epoch)
    return built


def _copy_tracked(folder: Path, stage: Path, epoch: int) -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        if (folder / name).is_file():  # else deleted, and not yet committed
            target = stage / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, target)
            target.chmod(0o755 if os.access(folder / name, os.X_OK) else 0o644)
            os.utime(target, (epoch, epoch))
    (stage / "MANIFEST.in").write_text(_ALSO_IN_SDIST)


def _repack(sdist: Path, epoch: int) -> None:
    """Setuptools writes the time of the build and the user's name into an sdist: the same files without these."""
    with tarfile.open(sdist) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers() if member.isfile()]
        contents = sorted((member.name, member.mode, file.read()) for member, file in members if file is not None)
    with (
        sdist.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, mode, content in contents:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(content), epoch, 0o755 if mode & 0o100 else 0o644
            archive.addfile(member, io.BytesIO(content))


def _commit_time() -> int:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=REPO, capture_output=True, text=True, check=True)
    return int(done.stdout)


def main() -> None:
    """Builds what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=REPO / "dist")
    given = parser.parse_args()
    unknown = [str(path) for path in given.folders if path.resolve() not in projects()]
    if unknown:
        known = ", ".join(str(path.relative_to(REPO)) for path in projects())
        parser.error(f"no package at {', '.join(unknown)}; allowed: {known}")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _commit_time())
    for folder in [path.resolve() for path in given.folders] or projects():
        for file in build(folder, given.out, epoch):
            print(file)


if __name__ == "__main__":
    main()
