#!/usr/bin/env bash
# Creates .venv: Python 3.11, the pinned CPU stack of 3rdparty/cpu.txt, and editable installs of the packages and apps.
#
#   scripts/setup.sh            install what is missing; does nothing if the stamp is current
#   scripts/setup.sh --force    reinstall everything into the existing .venv
#
# PLINTH_PYTHON        the Python 3.11 to use (else: python3.11 on PATH, python3 if it is 3.11, pyenv's)
# PLINTH_TORCH_INDEX   extra index for torch's CPU wheel (else PyTorch's own; empty: none)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=$root/.venv
stamp=$venv/.plinth-stamp
list=3rdparty/cpu.txt
log=.cache/setup.log
needed_mib=8000 # 4 GB installed, and the downloaded wheels beside them while pip works

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '       %s\n' "$line" >&2; done
  exit 1
}

# The stamp records the inputs of .venv, one line per part, and its path: a moved .venv does not work.
stack_line="stack $(cat "$list" scripts/setup.sh | sha256sum | cut -c1-40) $root"
packages_line="packages $(ls -d packages/*/pyproject.toml apps/pyproject.toml | xargs -r sha256sum | sha256sum | cut -c1-40)"
if [ "${1:-}" = --force ]; then
  rm -f "$stamp"
elif [ $# -gt 0 ]; then
  die "unknown argument $1" "usage: scripts/setup.sh [--force]"
fi
stamped() { [ -x "$venv/bin/python" ] && grep -qxF "$1" "$stamp" 2> /dev/null; }
if stamped "$stack_line" && stamped "$packages_line"; then
  exit 0
fi

is_311() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' > /dev/null 2>&1; }

find_python() {
  local candidate
  if [ -n "${PLINTH_PYTHON:-}" ]; then
    is_311 "$PLINTH_PYTHON" || die "PLINTH_PYTHON=$PLINTH_PYTHON is not a Python 3.11 with venv and ensurepip"
    echo "$PLINTH_PYTHON"
    return
  fi
  for candidate in python3.11 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3.11; do
    if is_311 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "no usable Python 3.11 found" \
    "Looked for python3.11 and python3 on PATH, and for pyenv's. It needs the modules venv and ensurepip." \
    "Debian and Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev" \
    "Elsewhere: install it, then PLINTH_PYTHON=/path/to/python3.11 scripts/setup.sh"
}

check_compiler() {
  command -v g++ > /dev/null || command -v c++ > /dev/null && return
  command -v gcc > /dev/null || command -v cc > /dev/null || die "no C compiler found (gcc or cc on PATH)" \
    "DeepSpeed and Triton compile operators with it on first use." \
    "Debian and Ubuntu: apt-get install build-essential"
  say "warning: no C++ compiler found (g++ or c++ on PATH): DeepSpeed's CPU offload will not work without one"
}

check_disk() {
  local free_mib
  free_mib=$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1024))
  [ "$free_mib" -ge "$needed_mib" ] || die "too little disk: $free_mib MiB free under $root, $needed_mib MiB needed" \
    "The stack takes about 4 GB, its downloads temporarily as much again."
}

# Output of pip and the build backends goes to a log, shown when a step fails.
pip() {
  echo "== pip $*" >> "$log"
  "$venv/bin/python" -m pip --disable-pip-version-check "$@" >> "$log" 2>&1 ||
    { tail -n 30 "$log" >&2; die "pip $1 failed (its last lines above, all of them in $log)"; }
}
pin() { grep -E "^$1==" "$list"; }

install_torch() {
  # First and by name: as a dependency, pip would resolve torch to the newest CUDA build. The CPU wheel is on PyTorch's own
  # index, used for this line only; if it is unreachable, pip falls back to its configured index.
  local index=${PLINTH_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
  pip install --no-deps --no-compile --retries 2 ${index:+--extra-index-url "$index"} "$(pin torch)"
  local build
  build=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
  case $build in
    *+cpu) ;;
    *) pip uninstall --yes torch
       die "pip found torch $build, which is not the CPU build; it was uninstalled" \
         "The CPU wheel ($(pin torch)+cpu) is on PyTorch's own index: is ${index:-an index with this wheel} reachable?" \
         "Or put the wheel into a folder and name it: PIP_FIND_LINKS=/folder scripts/setup.sh" ;;
  esac
}

install_stack() {
  local python rest started=$SECONDS
  python=$(find_python)
  check_compiler
  is_311 "$venv/bin/python" || check_disk
  is_311 "$venv/bin/python" || { say "creating .venv with $("$python" --version)"; "$python" -m venv --clear "$venv"; }
  sed -i '/^stack /d' "$stamp" 2> /dev/null || true
  say "installing the CPU stack of $list (some minutes the first time)"
  pip install "$(pin pip)" "$(pin setuptools)" "$(pin wheel)"
  install_torch
  say "torch is installed; $(grep -c == "$list") pinned distributions in all"
  rest=.cache/rest.txt
  grep -v -E '^(torch|deepspeed)==' "$list" > "$rest"
  pip install --no-deps --no-compile -r "$rest"
  # Its build imports torch and must not compile operators: they are compiled on first use.
  DS_BUILD_OPS=0 pip install --no-deps --no-compile --no-build-isolation "$(pin deepspeed)"
  # Byte-compile on all cores; pip would use one.
  "$venv/bin/python" -m compileall -q -j 0 "$venv/lib/python3.11/site-packages" > /dev/null 2>&1 || true
  check_stack
  echo "$stack_line" >> "$stamp"
  say "the stack is installed after $((SECONDS - started)) s"
}

check_stack() {
  "$venv/bin/python" - "$list" << 'PYTHON' || die "the stack in .venv is not what $list says (see above)" "scripts/setup.sh --force installs it again"
import sys
from importlib.metadata import PackageNotFoundError, version

def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"

pins = dict(line.strip().split("==") for line in open(sys.argv[1]) if "==" in line)
wrong = [f"{name}: {installed(name)} instead of {pin}" for name, pin in pins.items() if installed(name).split("+")[0] != pin]
# CUDA builds of these break `import transformers` with a CPU torch
wrong += [f"{name}: must not be installed" for name in ("torchvision", "torchaudio", "torchcodec") if installed(name) != "missing"]
print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
import torch
sys.exit(1 if wrong or torch.version.cuda else 0)
PYTHON
}

install_packages() {
  local project editables=()
  for project in packages/*/pyproject.toml apps/pyproject.toml; do
    [ -f "$project" ] && editables+=(--editable "$(dirname "$project")")
  done
  [ ${#editables[@]} -gt 0 ] || return 0
  say "installing $((${#editables[@]} / 2)) packages in editable form"
  pip install --no-deps --no-build-isolation --no-index "${editables[@]}"
  sed -i '/^packages /d' "$stamp"
  echo "$packages_line" >> "$stamp"
}

# Of two concurrent calls (make -j, two terminals) the second waits for the first.
mkdir -p .cache
if command -v flock > /dev/null; then
  exec 9> .cache/setup.lock
  flock 9
fi
: > "$log"
stamped "$stack_line" || install_stack
stamped "$packages_line" || install_packages
say "ready: .venv"
