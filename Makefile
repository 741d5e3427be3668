# `make demo` and `make test` work on a bare machine with Python 3.11, a C compiler and a package index.
PYTHON := .venv/bin/python
TYPED := $(patsubst %/py.typed,%,$(wildcard packages/*/*/py.typed))
# Starting processes is mostly waiting on one core. Tests that start some stay together by folder and come first
# (conftest.py); xdist's own order, by the number of tests in a group, would leave the longest for the end.
WORKERS ?= -n 2 --dist loadgroup --no-loadscope-reorder
# Two ranks and a server share the cores: one compute thread each is faster than a crowd.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast lint format pants clean distclean

help: ## This list
	@echo "Plinth. Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Arguments of the demo: make demo ARGS='trainer.seed=1 trainer.total_training_steps=10'"

setup: ## .venv with the pinned CPU stack and the packages (3 minutes once, then nothing)
	@scripts/setup.sh

demo: setup ## GRPO end to end on this machine: built-in model and task, 2 DeepSpeed ranks, a vLLM server
	$(PYTHON) -m apps.grpo.main $(ARGS)

test: setup ## Units, properties, real processes, a short run end to end
	$(PYTHON) -m pytest $(WORKERS) -m "not thorough" $(ARGS)

test-all: setup ## The same and what takes minutes: kill and resume, reshape, bench, compiled layers, the planner's bytes
	$(PYTHON) -m pytest $(WORKERS) $(ARGS)

test-fast: setup ## Units and properties only
	$(PYTHON) -m pytest $(WORKERS) -m "not slow and not e2e and not thorough" $(ARGS)

lint: setup ## ruff check, ruff format, mypy --strict
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy $(TYPED) apps

format: setup ## Format and sort imports in place
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

pants: setup ## Pants 2.17.1 into .cache/pants, for ./pants
	@scripts/pants-setup.sh

clean: ## Caches and build products; keeps .venv and outputs
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .pants.d .pids dist build
	find . -path ./.venv -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

distclean: clean ## clean, and .venv and .cache too
	rm -rf .venv .cache
