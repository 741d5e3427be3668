# `make demo` and `make test` run on a bare machine with Python 3.11, a C compiler and a package index; on a host with an
# NVIDIA GPU they set up the CUDA stack and use the GPU. PLINTH_STACK=cpu or cuda chooses by hand.
PYTHON := .venv/bin/python
TYPED := $(patsubst %/py.typed,%,$(wildcard packages/*/*/py.typed))
# Tests that start processes wait much of their time, so four workers suit two cores (478 s; three: 533 s). conftest.py
# groups these tests by package, runs the longest first, and keeps one worker for the others; xdist's default order is by
# the number of tests.
WORKERS ?= -n 4 --dist loadgroup --no-loadscope-reorder
# Two ranks and a server share the cores: one compute thread each is fastest.
export OMP_NUM_THREADS ?= 1
# Container images set it, and each of the hundreds of processes that tests start would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=
# The list that `make audit` reads.
STACK ?= cpu

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-long test-all test-fast bench-gpu mutants lint format pants dist alone licenses sbom audit clean distclean

help: ## Show this list
	@echo "Plinth. Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Arguments of the demo: make demo ARGS='trainer.seed=1 trainer.total_training_steps=10'"

setup: ## Install the pinned stack (CUDA beside an NVIDIA GPU, else CPU) and the packages into .venv
	@scripts/setup.sh

demo: setup ## Run GRPO end to end: built-in model and task, 2 DeepSpeed ranks, a vLLM server
	$(PYTHON) -m apps.grpo.main preset=demo $(ARGS)

demo-real: setup ## Fetch SmolLM2-135M-Instruct and real problems, and train it with GRPO: 3 minutes on a GPU, 15 on 2 cores
	$(PYTHON) -m apps.grpo.main preset=smollm2 $(if $(wildcard /dev/nvidia[0-9]*),,overlay=two_cores) $(ARGS)

test: setup ## Run unit, property and multi-process tests and a short end-to-end run; ARGS='-m gpu' tests the GPUs
	$(PYTHON) -m pytest $(WORKERS) -m "not long and not thorough" $(ARGS)

test-long: setup ## Run whole apps, example programs and numerics on many ranks, which CI adds to those of make test
	$(PYTHON) -m pytest $(WORKERS) -m "long and not thorough" $(ARGS)

test-all: setup ## Run all tests, also the thorough ones: kill and resume, reshape, bench, compiled layers, memory plans
	$(PYTHON) -m pytest $(WORKERS) $(ARGS)

test-fast: setup ## Run unit and property tests only
	$(PYTHON) -m pytest $(WORKERS) -m "not slow and not e2e and not long and not thorough" $(ARGS)

mutants: setup ## Plant faults one at a time in a copy of the tree and report which the tests catch (not in CI)
	$(PYTHON) scripts/mutants.py $(ARGS)

bench-gpu: setup ## Measure GRPO steps with default settings beside TRL (GPUs; two for TRL, which has to be installed)
	$(PYTHON) -m benchmarks.grpo_step.compare outputs/bench_gpu $(ARGS)

lint: setup ## Run ruff check, ruff format --check and mypy --strict
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy $(TYPED) apps benchmarks scripts examples/*.py

format: setup ## Format and sort imports
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

pants: setup ## Install Pants 2.17.1 into .cache/pants, for ./pants
	@scripts/pants-setup.sh

dist: setup ## Build the wheel and the sdist of every package into dist/, reproducibly
	$(PYTHON) scripts/build.py $(ARGS)

alone: setup ## Test each package alone: its wheel, what it declares and nothing else, its fast tests
	$(PYTHON) scripts/test_alone.py $(ARGS)

# Tools of the three targets below, beside .venv.
AUDIT := .cache/audit/bin
$(AUDIT)/pip-audit: | setup
	$(PYTHON) -m venv .cache/audit
	$(AUDIT)/python -m pip install --quiet pip-audit pip-licenses cyclonedx-bom

licenses: setup $(AUDIT)/pip-audit ## Print the license of every installed distribution; fails for a GPL, AGPL, SSPL or BUSL
	$(AUDIT)/pip-licenses --python $(PYTHON) --partial-match --fail-on "GPL;SSPL;BUSL" --ignore-packages pycountry

sbom: setup $(AUDIT)/pip-audit ## Write the bills of materials (CycloneDX) of both stacks into dist/
	@mkdir -p dist
	for stack in cpu cuda; do $(AUDIT)/cyclonedx-py requirements 3rdparty/$$stack.txt --pyproject apps/pyproject.toml \
	    --output-reproducible -o dist/sbom_$$stack.json || exit 1; done

# Without hashes: pip-audit wants them for all or for none, and torch in the CPU list has none.
audit: setup $(AUDIT)/pip-audit ## Look up known vulnerabilities of the pins of STACK=cpu or cuda (not in CI)
	sed 's/ .*//' 3rdparty/$(STACK).txt > .cache/audit/pins.txt
	$(AUDIT)/pip-audit --strict --no-deps --disable-pip -r .cache/audit/pins.txt

.PHONY: docs docs-serve
docs: ## Build the documentation site into build/site and check it (installs MkDocs into .cache/docs, not into .venv)
	@scripts/docs.sh

docs-serve: ## Show the documentation site at http://127.0.0.1:8000 and rebuild it when a file changes
	@scripts/docs.sh serve $(ARGS)

clean: ## Remove caches and build products; keep .venv and outputs
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .pants.d .pids dist build
	find . -path ./.venv -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv and .cache
	rm -rf .venv .cache
