# longfold: every command of the house. Each creates .venv with the pinned requirements first, so a fresh clone needs nothing else.
#   make train ARGS="model=gpt2 run.steps=20"    overrides go in ARGS
#   make test ARGS="tests/kernels -k sink"       so do pytest's arguments

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The first Python that is new enough; PYTHON=/path/to/python overrides it.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test deep lint bench

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## create .venv and install the pinned requirements

$(STAMP): requirements.txt requirements-dev.txt requirements-extras.txt
	@test -n "$(PYTHON)" || { echo "longfold needs Python 3.11 or newer, and none is on the PATH; give one with PYTHON=/path/to/python." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt -r requirements-extras.txt
	@touch $@

train: $(STAMP) ## train; overrides in ARGS="model=gpt2 run.steps=20"
	@$(BIN)/python train.py $(ARGS)

test: $(STAMP) lint ## linters, then every test but the long ones (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -q -m "not deep" $(ARGS)

deep: $(STAMP) lint ## the whole suite, long ones too (an hour and a half on 2 cores)
	$(BIN)/python -m pytest -q $(ARGS)

lint: $(STAMP) ## ruff, pyright, and the floors (import-linter)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "ruff format would change the files above: .venv/bin/ruff format ." >&2; $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/pyright --warnings | tail -n 25
	@$(BIN)/lint-imports

bench: $(STAMP) ## what the CPU backend, a training step and planning cost
	@$(BIN)/python -m bench.cpu $(ARGS)
	@$(BIN)/python -m bench.plan_time $(ARGS)
