#!/usr/bin/env bash
# Prepares Pants 2.17.1 in .cache/pants from the package index alone, for machines that cannot reach its download sites.
# The wrapper ./pants runs it. Not needed with network access and Pants' own launcher.
#
#   scripts/pants-setup.sh      install what is missing
#
# PLINTH_PYTHON39   the Python 3.9 that runs Pants itself (else: python3.9 on PATH, pyenv's, uv's). The code it builds
#                   and tests runs on .venv's Python 3.11.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
home=$root/.cache/pants
pins=3rdparty/pants/pants-2.17.1.txt
pex_version=2.1.137 # the one Pants 2.17.1 asks for

say() { printf 'pants-setup: %s\n' "$*"; }
die() {
  printf 'pants-setup: error: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '             %s\n' "$line" >&2; done
  exit 1
}

stamp_line="$(cat "$pins" scripts/pants-setup.sh | sha256sum | cut -c1-40) $root"
if [ -x "$home/venv/bin/pants" ] && grep -qxF "$stamp_line" "$home/stamp" 2> /dev/null; then
  exit 0
fi

is_39() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 9))' > /dev/null 2>&1; }

find_python39() {
  local candidate
  if [ -n "${PLINTH_PYTHON39:-}" ]; then
    is_39 "$PLINTH_PYTHON39" || die "PLINTH_PYTHON39=$PLINTH_PYTHON39 is not a Python 3.9 with venv and ensurepip"
    echo "$PLINTH_PYTHON39"
    return
  fi
  for candidate in python3.9 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.9.*/bin/python3.9 \
    "$(uv python find --no-project 3.9 2> /dev/null || true)"; do
    if [ -n "$candidate" ] && is_39 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "no usable Python 3.9 found; Pants 2.17.1 runs on nothing newer" \
    "Looked for python3.9 on PATH, pyenv's and uv's. It needs the modules venv and ensurepip, and its C headers." \
    "pyenv install 3.9 or uv python install 3.9 get one; or PLINTH_PYTHON39=/path/to/python3.9 scripts/pants-setup.sh"
}

python39=$(find_python39)
python311=$(.venv/bin/python -c 'import sys; print(sys._base_executable)' 2> /dev/null) ||
  die "no .venv: run scripts/setup.sh first" "Pants takes the heavy stack (torch, vLLM, DeepSpeed, Ray) from there."

say "installing Pants with $("$python39" --version) into .cache/pants"
rm -rf "$home"
mkdir -p "$home"
"$python39" -m venv "$home/venv"
pip() { "$home/venv/bin/python" -m pip --disable-pip-version-check "$@" 2> >(grep -v 'is ignored: it is neither a file' >&2); }
pip install --quiet --no-deps -r "$pins"

# Pants downloads one program from outside the index: the pex command-line tool. A build from the index is the same
# program but a different file, so the config below gives its path, hash and size.
say "building the pex $pex_version command line tool"
"$home/venv/bin/pex" "pex==$pex_version" --console-script pex --output-file "$home/pex" ||
  die "pex $pex_version could not be built (see above)"

cat > "$home/local.toml" << TOML
# Written by scripts/pants-setup.sh for this machine; PANTS_CONFIG_FILES names it.
[pex-cli]
version = "v$pex_version"
url_template = "file://$home/pex"
known_versions = [
    "v$pex_version|linux_x86_64|$(sha256sum "$home/pex" | cut -d' ' -f1)|$(stat -c %s "$home/pex")",
]

[python-bootstrap]
# The interpreter of .venv: Pants and .venv must use the same one.
search_path = ["$(dirname "$python311")"]
TOML
echo "$stamp_line" > "$home/stamp"
say "ready: ./pants"
