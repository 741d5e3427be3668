#!/usr/bin/env bash
# Re-resolves the pinned lists in 3rdparty/ from the direct requirements in 3rdparty/*.in.
#
#   scripts/lock.sh                          keep every pin that still satisfies the requirements
#   scripts/lock.sh --upgrade                upgrade everything to the newest compatible version
#   scripts/lock.sh --upgrade-package ray    upgrade one
#
# The lists have one line per distribution, with hashes, and no addresses. scripts/setup.sh installs 3rdparty/cpu.txt or
# 3rdparty/cuda.txt; Pants' resolves read the lists in 3rdparty/pants/, pinned to the versions of 3rdparty/cpu.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv_env=.cache/uv
if [ ! -x "$uv_env/bin/uv" ]; then
  python3.11 -m venv "$uv_env"
  "$uv_env/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi

resolve() { # resolve OUTPUT INPUT [option...]
  local output=$1 input=$2
  shift 2
  echo "resolving $output"
  "$uv_env/bin/uv" pip compile --quiet --python-version 3.11 --no-header --no-annotate \
    "$input" --output-file "$output" "$@" > /dev/null
}

# The hashes are those of the files for CPython 3.11 and this platform. With the files of all platforms, as
# `uv pip compile --generate-hashes` lists them, the list is thirty times as long.
add_hashes() { # add_hashes LIST PLATFORM [NAME]: a distribution that stays without hashes
  resolve .cache/pylock.toml "$1" --no-deps --python-platform "$2"
  "$uv_env/bin/python" - .cache/pylock.toml "${3:-}" > "$1" << 'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as lock:
    for package in tomllib.load(lock)["packages"]:
        files = package.get("wheels") or [package["sdist"]]
        hashes = sorted({f"--hash=sha256:{file['hashes']['sha256']}" for file in files})
        print(f"{package['name']}=={package['version']}", *(hashes if package["name"] != sys.argv[2] else ()))
PYTHON
}

resolve 3rdparty/cpu.txt 3rdparty/cpu.in --override 3rdparty/cpu-overrides.txt "$@"
resolve 3rdparty/pants/python-default.txt 3rdparty/pants/python-default.in --constraint 3rdparty/cpu.txt
resolve 3rdparty/pants/pytest.txt 3rdparty/pants/pytest.in --constraint 3rdparty/cpu.txt
resolve 3rdparty/pants/setuptools.txt 3rdparty/pants/setuptools.in --constraint 3rdparty/cpu.txt
platform=x86_64-manylinux_2_31 # the oldest glibc that all wheels of the CUDA stack work with
# The documentation site, which scripts/docs.sh installs into .cache/docs: the stack's versions of what both have.
resolve 3rdparty/docs.txt 3rdparty/docs.in --constraint 3rdparty/cpu.txt --python-platform "$platform" "$@"
add_hashes 3rdparty/docs.txt "$platform"
resolve 3rdparty/cuda.txt 3rdparty/cuda.in --override 3rdparty/cuda-overrides.txt --python-platform "$platform" "$@"
add_hashes 3rdparty/cuda.txt "$platform"
# The CPU build of torch has another hash on each index: 2.13.0 is a CUDA build on the Python Package Index.
add_hashes 3rdparty/cpu.txt "$platform" torch
git diff --stat -- 3rdparty || true
