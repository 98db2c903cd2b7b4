# make quickstart | test | lint | format | clean        (make help says what each does)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.scalerl-installed
TORCH := torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One thread per process: tests and the quickstart run several processes on few cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

PYTEST_ARGS ?=
PYTEST = $(ONE_THREAD) $(BIN)/python -m pytest --durations=25 $(PYTEST_ARGS)
# Each test of these starts processes of its own, so they run one by one; those of tests/unit side by side.
ONE_BY_ONE := tests/dist tests/ray tests/sglang tests/slurm tests/e2e

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

# Content, not times, so that a checkout does not reinstall; the folder, because a copied environment points to the old one.
STATE := $(shell cat requirements/cpu.txt requirements/cpu-nodeps.txt pyproject.toml Makefile | cksum) $(CURDIR)
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(STATE))
.PHONY: $(STAMP)
endif

$(STAMP):
	@set -e; \
	if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  for python in $(or $(PYTHON),python3.11 python3 python3.12); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "make: no Python 3.11 or newer among: $(or $(PYTHON),python3.11 python3 python3.12)." \
	      "Install python3.11, or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; \
	  fi; \
	  echo "setup: $$($$python --version) ($$(command -v $$python)) -> $(VENV)"; \
	  $$python -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install -qq $(TORCH) -c requirements/cpu.txt
	$(BIN)/python -m pip install -qq -r requirements/cpu.txt
	$(BIN)/python -m pip install -qq --no-deps -r requirements/cpu-nodeps.txt
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@printf '%s\n' '$(STATE)' > $(STAMP)
	@echo "setup: done. Activate with: . $(BIN)/activate"

setup: $(STAMP) ## make .venv with the pinned versions (again: nothing to do)

quickstart: setup ## train the arithmetic example on the CPU and merge the model
	$(ONE_THREAD) $(BIN)/python examples/arithmetic/quickstart.py

test: setup ## all tests but tests/gpu (TESTS=path, PYTEST_ARGS=... narrow it)
ifdef TESTS
	$(PYTEST) $(TESTS)
else
	@status=0; $(PYTEST) -n logical --maxprocesses 8 tests/unit || status=1; $(PYTEST) $(ONE_BY_ONE) || status=1; exit $$status
endif

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## ruff: fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and outputs/
	rm -rf $(VENV) outputs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
