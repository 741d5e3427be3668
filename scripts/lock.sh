#!/usr/bin/env bash
# Re-resolves the pinned lists in 3rdparty/ from the direct requirements in 3rdparty/*.in.
#
#   scripts/lock.sh                          keep every pin that still satisfies the requirements
#   scripts/lock.sh --upgrade                upgrade everything to the newest compatible version
#   scripts/lock.sh --upgrade-package ray    upgrade one
#
# The lists hold plain `name==version` lines: no URLs, no hashes of one index's builds. scripts/setup.sh installs
# 3rdparty/cpu.txt; Pants' resolves read the lists in 3rdparty/pants/, pinned to the same versions.
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

resolve 3rdparty/cpu.txt 3rdparty/requirements.in --override 3rdparty/overrides.txt "$@"
resolve 3rdparty/pants/python-default.txt 3rdparty/pants/python-default.in --constraint 3rdparty/cpu.txt
resolve 3rdparty/pants/pytest.txt 3rdparty/pants/pytest.in --constraint 3rdparty/cpu.txt
resolve 3rdparty/pants/setuptools.txt 3rdparty/pants/setuptools.in --constraint 3rdparty/cpu.txt
git diff --stat -- 3rdparty || true
