#!/usr/bin/env bash
# Builds the documentation site into build/site, without .venv and without torch.
#
#   scripts/docs.sh                  build, refuse any warning (a broken link, a page outside the navigation), check the pages
#   scripts/docs.sh serve [OPTION…]  show it at http://127.0.0.1:8000 and build again when a file changes
#
# MkDocs and its plugins (3rdparty/docs.txt, with hashes) are installed into .cache/docs. PLINTH_PYTHON names the Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PIP_CONSTRAINT

venv=.cache/docs
stamp=$(sha256sum 3rdparty/docs.txt)
if [ "$(cat $venv/.stamp 2> /dev/null)" != "$stamp" ]; then
  python=${PLINTH_PYTHON:-.venv/bin/python}
  [ -x "$(command -v "$python")" ] || python=python3.11
  "$python" -m venv --clear $venv
  $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps -r 3rdparty/docs.txt
  echo "$stamp" > $venv/.stamp
fi

PYTHONPATH=$(printf '%s:' packages/*/)$PWD
export PYTHONPATH NO_MKDOCS_2_WARNING=1
if [ "${1:-}" = serve ]; then
  exec $venv/bin/python -m mkdocs serve "${@:2}"
fi
# With --quiet, MkDocs does not count warnings either.
$venv/bin/python -m mkdocs build --strict --clean 2>&1 | { grep -v '^INFO' || true; }
$venv/bin/python -m scripts.docs_site.check build/site
