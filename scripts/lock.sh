#!/usr/bin/env bash
# Re-resolves the pinned lists in 3rdparty/ from the direct requirements in 3rdparty/*.in.
#
#   scripts/lock.sh                          keep every pin that still satisfies the requirements
#   scripts/lock.sh --upgrade                upgrade everything to the newest compatible version
#   scripts/lock.sh --upgrade-package ray    upgrade one
#
# The lists have one line per distribution, with hashes, and no addresses. scripts/setup.sh installs 3rdparty/cpu.txt or
# 3rdparty/cuda.txt; Pants' resolves read the lists in 3rdparty/pants/, pinned to the versions of 3rdparty/cpu.txt.
# The two stacks' lists serve all Pythons of scripts/setup.sh: one set of versions, and the hashes of each Python's files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=3.11
other_pythons="3.12 3.13"

uv_env=.cache/uv
if [ ! -x "$uv_env/bin/uv" ]; then
  python3.11 -m venv "$uv_env"
  "$uv_env/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi

resolve() { # resolve OUTPUT INPUT [option...]
  local output=$1 input=$2
  shift 2
  echo "resolving $output"
  "$uv_env/bin/uv" pip compile --quiet --python-version "$python" --no-header --no-annotate \
    "$input" --output-file "$output" "$@" > /dev/null
}

# Refuses a list that lacks what another Python needs, or has other versions than the requirements allow there.
check_other_pythons() { # check_other_pythons LIST INPUT [option...]
  local list=$1 input=$2 python
  shift 2
  for python in $other_pythons; do
    rm -f .cache/other.txt
    resolve .cache/other.txt "$input" --constraint "$list" "$@"
    diff "$list" .cache/other.txt >&2 || { echo "lock: Python $python needs another list (> above); pin it in 3rdparty/*.in" >&2; exit 1; }
  done
}

# The hashes are those of the files for CPython and this platform. With the files of all platforms, as
# `uv pip compile --generate-hashes` lists them, the list is thirty times as long.
add_hashes() { # add_hashes LIST PLATFORM PYTHONS [NAME]: a distribution that stays without hashes
  local python
  rm -f .cache/pylock.*.toml
  for python in $3; do
    resolve ".cache/pylock.${python/./}.toml" "$1" --no-deps --python-platform "$2"
  done
  "$uv_env/bin/python" - "${4:-}" .cache/pylock.*.toml > .cache/hashed.txt << 'PYTHON'
import sys
import tomllib

found: dict[str, set[str]] = {}
for path in sys.argv[2:]:
    with open(path, "rb") as lock:
        for package in tomllib.load(lock)["packages"]:
            files = package.get("wheels") or [package["sdist"]]
            hashes = {f"--hash=sha256:{file['hashes']['sha256']}" for file in files}
            found.setdefault(f"{package['name']}=={package['version']}", set()).update(hashes)
for pin, hashes in found.items():
    print(pin, *(sorted(hashes) if pin.split("==")[0] != sys.argv[1] else ()))
PYTHON
  mv .cache/hashed.txt "$1"
}

resolve 3rdparty/cpu.txt 3rdparty/cpu.in --override 3rdparty/cpu-overrides.txt "$@"
resolve 3rdparty/pants/python-default.txt 3rdparty/pants/python-default.in --constraint 3rdparty/cpu.txt
resolve 3rdparty/pants/pytest.txt 3rdparty/pants/pytest.in --constraint 3rdparty/cpu.txt
resolve 3rdparty/pants/setuptools.txt 3rdparty/pants/setuptools.in --constraint 3rdparty/cpu.txt
platform=x86_64-manylinux_2_31 # the oldest glibc that all wheels of the CUDA stack work with
# The documentation site, which scripts/docs.sh installs into .cache/docs: the stack's versions of what both have.
resolve 3rdparty/docs.txt 3rdparty/docs.in --constraint 3rdparty/cpu.txt --python-platform "$platform" "$@"
add_hashes 3rdparty/docs.txt "$platform" "$python"
resolve 3rdparty/cuda.txt 3rdparty/cuda.in --override 3rdparty/cuda-overrides.txt --python-platform "$platform" "$@"
check_other_pythons 3rdparty/cuda.txt 3rdparty/cuda.in --override 3rdparty/cuda-overrides.txt --python-platform "$platform"
add_hashes 3rdparty/cuda.txt "$platform" "$python $other_pythons"
# The CPU build of torch has another hash on each index: 2.13.0 is a CUDA build on the Python Package Index.
check_other_pythons 3rdparty/cpu.txt 3rdparty/cpu.in --override 3rdparty/cpu-overrides.txt --python-platform "$platform"
add_hashes 3rdparty/cpu.txt "$platform" "$python $other_pythons" torch
git diff --stat -- 3rdparty || true
