"""libaio for DeepSpeed's asynchronous I/O: the installed one, or Debian's packages, unpacked without root."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def libaio_variables(folder: Path) -> dict[str, str] | None:
    """Environment variables with which compilers and processes find libaio; None if it cannot be had.

    Args:
        folder: for the packages, if it is not installed.
    """
    if Path("/usr/include/libaio.h").exists():
        return {}
    (folder / "lists").mkdir()
    own_lists = ["-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"]
    downloaded = _download(folder) or (_run("apt-get", "-qq", *own_lists, "update") and _download(folder, own_lists))
    packages = sorted(folder.glob("*.deb"))
    if not downloaded or not all(_run("dpkg-deb", "--extract", str(each), str(folder / "root")) for each in packages):
        return None
    header = next((folder / "root").rglob("libaio.h"), None)
    libraries = {str(path.parent) for path in (folder / "root").rglob("libaio.so*")}
    if header is None or not libraries:
        return None
    paths = ":".join(sorted(libraries))
    return {
        # DeepSpeed's check compiles with the first two, its build with the next two, and processes load with the last.
        "CFLAGS": f"-I{header.parent}",
        "LDFLAGS": " ".join(f"-L{path}" for path in sorted(libraries)),
        "CPATH": str(header.parent),
        "LIBRARY_PATH": paths,
        "LD_LIBRARY_PATH": paths,
    }


def small_torch_header(folder: Path) -> Path:
    """A folder whose torch/extension.h has no neural network modules, for CPATH, which goes before torch's own folder.

    The operator needs tensors and pybind11's conversions; the rest is most of its compile time.
    """
    header = folder / "torch" / "extension.h"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>\n")
    return folder


def compiler_without_debug_symbols(folder: Path) -> str:
    """A g++ in `folder`, for CXX: DeepSpeed asks for debug symbols, which are half of the operator's compile time."""
    folder.mkdir()
    script = folder / "g++"  # torch warns of a compiler with another name
    script.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@" -g0\n')
    script.chmod(0o755)
    return str(script)


def _download(folder: Path, options: list[str] | None = None) -> bool:
    return any(
        _run("apt-get", "-qq", *(options or []), "download", "libaio-dev", library, folder=folder)
        for library in ("libaio1t64", "libaio1")
    )


def _run(*command: str, folder: Path | None = None) -> bool:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
