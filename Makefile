# make quickstart | check | test | test-all | lint | types | format | docs | clean        (make help says what each does)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.scalerl-installed
# PyTorch calls its CPU builds +cpu. On Linux the version without it is a CUDA build, with gigabytes of libraries.
TORCH_VERSION := 2.13.0
TORCH ?= torch==$(TORCH_VERSION)$(if $(filter Linux,$(shell uname -s)),+cpu)
# Where else to look for it.
TORCH_INDEX ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The requirements are complete: nothing to resolve. uv installs them where it can, pip elsewhere; neither compiles, all cores do it
# afterwards, and what runs rarely import is compiled when they do.
INSTALL = $(BIN)/python requirements/install.py
RARE := /tests?/|/transformers/models/|/matplotlib/|/networkx/|/databricks/|/ray/(rllib|data|serve|tune|train|llm)/
RARE := $(RARE)|/sglang/(multimodal_gen|test)/|/pip/|/sympy/physics/|/pygments/lexers/
# One thread per process: tests and the quickstart run several processes on few cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

PYTEST_ARGS ?=
PYTEST = $(ONE_THREAD) $(BIN)/python -m pytest --durations=25
# Each in one process, without services. Some wait a second or two: one more than cores; beside the services'
# tests half as many, which run when those wait.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
AT_MOST_8 = $(shell echo $$(($(1) > 8 ? 8 : $(1))))
UNIT = -n $(call AT_MOST_8,$(CORES) + 1) tests/unit
UNIT_BESIDE = -n $(call AT_MOST_8,($(CORES) + 1) / 2) tests/unit
# These start processes of their own, and wait a good part of the time: two side by side where each has 6 GiB.
MEMORY := /proc/meminfo
ifndef AT_A_TIME
AT_A_TIME := $(shell awk '$$1 == "MemAvailable:" { many = $$2 / 2 ^ 20 } END { print (many < 12 ? 1 : 2) }' $(MEMORY) 2>/dev/null)
endif
SIDE_BY_SIDE = $(if $(filter-out 1,$(AT_A_TIME)),-n $(AT_A_TIME) --dist loadscope)
SERVICES = $(SIDE_BY_SIDE) tests/ray tests/dist tests/slurm tests/sglang tests/e2e
# What only `make test-all` runs (docs/testing.md): tests with this mark, and hypothesis' whole budget.
MAIN := -m "not full"
QUICK := --hypothesis-profile=quick

# What tests show of each family (tests/families.py): a part of each of the two, and a page of both, $(FAMILIES).md.
FAMILIES := outputs/families
FAMILIES_PART = --families $(FAMILIES)/$@.json

.DEFAULT_GOAL := help
.PHONY: help torch setup quickstart setup-gpu quickstart-gpu gpu check test test-all lint types format docs clean
.PHONY: unit types-beside unit-beside services

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

# Content, not times, so that a checkout does not reinstall; the folder, because a copied environment points to the old one.
STATE := $(shell cat requirements/cpu.txt requirements/cpu-nodeps.txt requirements/megatron.txt requirements/cpu-torchvision.txt requirements/install.py pyproject.toml Makefile | cksum) $(CURDIR)
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
	@$(MAKE) --no-print-directory torch
	$(INSTALL) --no-deps -r requirements/cpu.txt -r requirements/cpu-nodeps.txt
	$(INSTALL) --no-deps --ignore-requires-python -r requirements/megatron.txt
	$(INSTALL) --no-deps --target $(VENV)/optional/torchvision -r requirements/cpu-torchvision.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true
	@printf '%s\n' '$(STATE)' > $(STAMP)
	@echo "setup: done. Activate with: . $(BIN)/activate"

torch:
	@$(INSTALL) $(if $(findstring +cpu,$(TORCH)),--no-deps,-c requirements/cpu.txt) $(addprefix --extra-index-url ,$(TORCH_INDEX)) '$(TORCH)' || { \
	  echo "setup: no $(TORCH) (pip says why above). If your package index has no CPU builds, take PyTorch's own:"; \
	  echo "  make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu"; \
	  echo "or what the index has, which on Linux is a CUDA build of some gigabytes:"; \
	  echo "  make setup TORCH=torch==$(TORCH_VERSION)"; exit 2; } >&2

setup: $(STAMP) ## make .venv with the pinned versions (again: nothing to do)

quickstart: setup ## train the arithmetic example on the CPU and merge the model
	$(ONE_THREAD) $(BIN)/python examples/arithmetic/quickstart.py

# Another environment than .venv: it has the CUDA builds. GPU_PYTHON=python takes one that is there, as in an image.
GPU_VENV := .venv-gpu
GPU_PYTHON ?= $(GPU_VENV)/bin/python
DEVICES ?= 1

$(GPU_VENV)/.scalerl-installed: requirements/gpu.txt pyproject.toml
	$(or $(PYTHON),python3) -m venv --clear $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install -q --no-deps --ignore-requires-python -r requirements/gpu.txt
	$(GPU_VENV)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

setup-gpu: $(GPU_VENV)/.scalerl-installed ## make .venv-gpu with requirements/gpu.txt: some gigabytes

quickstart-gpu: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),setup-gpu) ## doctor --gpu, then the quickstart on a GPU (DEVICES=8: on eight)
	$(GPU_PYTHON) -m scalerl.cli doctor --gpu
	$(GPU_PYTHON) examples/arithmetic/quickstart.py --gpus $(DEVICES) --out outputs/quickstart-gpu

LIMIT ?= 1800
OUT ?= outputs/gpu

gpu: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),setup-gpu) ## what one GPU can show, in LIMIT seconds, into OUT (outputs/gpu)
	$(GPU_PYTHON) benchmarks/gpu.py --limit-s $(LIMIT) --out $(OUT)

# Two targets side by side, neither of which ends the other. A shell's `&` would make their processes ignore Ctrl-C.
BESIDE = +@$(MAKE) --no-print-directory --keep-going --jobs=2
SAID_LAST := The tests of tests/unit run beside these; what they say comes at their end.
# What one of the two says, together at its end.
AT_THE_END = log=$$(mktemp) && trap 'rm -f "$$log"' EXIT && { $(1) >"$$log" 2>&1; status=$$?; cat "$$log"; exit $$status; }

check: lint ## lint, types and unit tests
	$(BESIDE) types-beside unit

unit: setup
	$(PYTEST) $(MAIN) $(QUICK) $(PYTEST_ARGS) $(UNIT)

types-beside: setup
	@$(call AT_THE_END,$(TYPES))

test: setup ## every test but those marked full (TESTS=path: those alone, and all of them; PYTEST_ARGS=...)
ifdef TESTS
	$(PYTEST) $(PYTEST_ARGS) $(TESTS)
else
	@rm -rf $(FAMILIES) $(FAMILIES).md
	@echo "$(SAID_LAST)"
	$(BESIDE) unit-beside services
endif

unit-beside: setup
	@$(call AT_THE_END,nice -n 5 env $(PYTEST) $(MAIN) $(QUICK) $(FAMILIES_PART) $(PYTEST_ARGS) $(UNIT_BESIDE))

services: setup
	$(PYTEST) $(MAIN) $(FAMILIES_PART) $(PYTEST_ARGS) $(SERVICES)

test-all: setup ## every test but tests/gpu, on every layout
	@rm -rf $(FAMILIES) $(FAMILIES).md
	@echo "$(SAID_LAST)"
	$(BESIDE) MAIN= QUICK= unit-beside services

# With what `scalerl launch slurm` writes.
SCRIPTS := .ci/run docker/*.sh scalerl/extras/slurm/scripts/* tests/unit/extras/slurm/golden/*.sbatch

TYPES = $(BIN)/pyright --pythonpath $(BIN)/python

lint: setup ## ruff: rules and format; hadolint and shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/shellcheck $(SCRIPTS)

types: setup ## pyright over scalerl/ and tests/types/
	$(TYPES)

format: setup ## ruff: fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site needs packages that nothing else needs: they have an environment of their own.
DOCS_VENV := .venv-docs
# The tables of keys are made by scalerl itself.
DOCS_PYTHON ?= $(BIN)/python

$(DOCS_VENV)/.scalerl-installed: requirements/docs.txt
	$(or $(PYTHON),python3) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q --no-deps -r requirements/docs.txt
	@touch $@

docs: $(DOCS_VENV)/.scalerl-installed $(if $(filter $(BIN)/%,$(DOCS_PYTHON)),setup) ## the pages, the figures and the API as a site: outputs/site
	$(DOCS_VENV)/bin/python docs/make_figures.py
	SCALERL_PYTHON=$(DOCS_PYTHON) NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true \
	  $(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "docs: outputs/site/index.html"

clean: ## remove .venv, caches and outputs/
	rm -rf $(VENV) $(GPU_VENV) $(DOCS_VENV) outputs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
