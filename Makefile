# Everything that a developer or CI does here. `make help` lists it. All of it needs only a python3 (see setup.cfg for how
# new); `make decode PYTHON=python3.12` uses another one.

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

# python3 gets .venv. A Python named explicitly gets a folder of its own, .venv-3.12 say, so that two of them can be tested
# in turn without setting up each time. What is inside is checked on every run (.ci/venv), whatever the folder's name.
# A VENV of the person's environment is theirs: only `make VENV=folder` is heard.
ifneq ($(origin VENV),command line)
  ifeq ($(PYTHON),python3)
    VENV := .venv
  else
    VENV := .venv-$(shell '$(PYTHON)' -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
  endif
endif
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL: # targets share one environment
.PHONY: help decode test test-all check format format-check lint types pytest venv venv-dev clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@echo
	@echo "PYTHON=python3.12 picks a Python, ARGS='...' goes to decode.py or pytest, WORKERS=$(WORKERS) test processes."

decode: venv ## generate text with a small model (ARGS='--prompt=...')
	@$(RUN) scripts/decode.py $(ARGS)

test: check pytest ## what CI runs: format, lint, types, tests

test-all: test ## and the TPU kernels in every combination, compiled for every chip: long
	@$(RUN) -m pytest --numprocesses=auto --maxprocesses=$(WORKERS) -m product $(ARGS)

check: format-check lint types ## everything of `test` but the tests

format: venv-dev ## rewrite the code as the formatter wants it
	@$(RUN) -m ruff check --quiet --select I --fix .
	@$(RUN) -m ruff format .

format-check: venv-dev
	@echo "jpaged: format"
	@$(RUN) -m ruff format --quiet --diff . || { echo 'jpaged: `make format` mends this' >&2; exit 1; }

lint: venv-dev ## ruff
	@echo "jpaged: lint"
	@$(RUN) -m ruff check --quiet .

types: venv-dev ## pyright
	@echo "jpaged: types"
	@$(RUN) -m pyright --pythonpath $(RUN)

# XLA compiles on one core for most of a test's time, so two processes finish in little more than half the time of one.
pytest: venv-dev ## the tests alone (ARGS='-k name')
	@echo "jpaged: tests"
	@$(RUN) -m pytest --numprocesses=auto --maxprocesses=$(WORKERS) --dist=loadgroup $(ARGS)

venv:
	@.ci/venv '$(VENV)' '$(PYTHON)'

venv-dev:
	@.ci/venv '$(VENV)' '$(PYTHON)' dev

clean: ## remove environments, caches and build products
	@rm -rf .venv .venv-* .cache .hypothesis .pytest_cache .ruff_cache build dist ./*.egg-info
	@find jpaged models pallas_kernels scripts tests -name __pycache__ -prune -exec rm -rf {} +
