# Every target but lock, clean and help sets the project up first, into .venv; a second run installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := setup
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTEST := $(BIN)/python -m pytest

# Where torch's CPU wheel comes from when the configured package index has none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Only Linux has a separate CPU build; elsewhere the plain wheel is it.
TORCH := torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
# Needed by reasoning-gym and published as C source only; see requirements/pycosat_stand_in.
PYCOSAT := pycosat==0.6.6

# One stamp per step of the set-up, holding the seconds the step took; their sum is what a fresh set-up takes.
STAMPS := $(VENV)/stamps
STAMP = echo $$SECONDS > $@
SETUP_SECONDS = $$(( $$(cat $(STAMPS)/* | tr '\n' '+') 0 ))

.PHONY: setup quickstart test test-full test-failed check lint docs bench format lock clean help

setup: $(STAMPS)/4-package ## Make .venv and install everything into it (under 8 minutes).
	@echo "$(VENV) is ready; setting it up took $(SETUP_SECONDS) s"

quickstart: setup ## Train a small instruct model with GRPO on this machine's CPU (under 20 minutes); ARGS go to the recipe.
	RL_VLLM_SETUP_SECONDS=$(SETUP_SECONDS) $(BIN)/python sota-implementations/grpo/grpo_sync.py --config quickstart $(ARGS)

test: setup ## Run the tests (under 20 minutes).
	$(PYTEST) -m "not slow"

test-full: setup ## Run the tests and those marked slow.
	$(PYTEST)

test-failed: setup ## Run again, alone, the tests that failed last time; fails when there were none.
	$(PYTEST) --last-failed --last-failed-no-failures none

check: lint ## Check format, lint, types and house rules, and run the tests without engines (under 3 minutes).
	$(PYTEST) -q -m "not slow and not engine" tests/house tests/unit tests/contract

lint: setup ## Check format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: setup ## Build the documentation into docs/_build/html.
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

bench: setup ## Measure what the service and the policy cost over the bare engine.
	mkdir -p outputs
	$(BIN)/python benchmarks/overhead.py --json outputs/overhead.json

format: setup ## Format the code and correct what the linter can.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## Make requirements/cpu.lock from cpu.in and overrides.txt; UPGRADE=--upgrade takes the newest versions.
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip --disable-pip-version-check --quiet install uv
	.venv-lock/bin/uv pip compile requirements/cpu.in --override requirements/overrides.txt $(UPGRADE) \
		--python-version 3.11 --universal --no-annotate --no-header --quiet --output-file requirements/cpu.lock
	rm -rf .venv-lock

clean: ## Remove .venv and everything that was built or written.
	rm -rf $(VENV) .venv-lock build *.egg-info outputs docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis

help: ## List the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | while IFS= read -r line; do \
		printf '  %-12s%s\n' "$${line%%:*}" "$${line##*## }"; done

$(STAMPS)/1-venv:
	@for python in "$(PYTHON)" python3.11 python3; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null; then break; fi; \
		python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo "Python 3.11 is needed, and neither $(PYTHON) nor python3 is it:" \
			"install it, or name it with make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$(command -v "$$python")"; \
	"$$python" -m venv --clear $(VENV) || { \
		echo "$$python has no venv module that works: on Debian and Ubuntu, install python3.11-venv" >&2; exit 1; \
	}; \
	mkdir -p $(STAMPS) && $(STAMP)

$(STAMPS)/2-torch: $(STAMPS)/1-venv
	@echo "installing $(TORCH)"; \
	$(PIP) install --no-deps "$(TORCH)" 2> $(VENV)/torch.log || { \
		echo "the configured package index does not give $(TORCH) (see $(VENV)/torch.log): trying $(TORCH_CPU_INDEX)"; \
		$(PIP) install --no-deps --index-url "$(TORCH_CPU_INDEX)" "$(TORCH)"; \
	} && $(STAMP)

$(STAMPS)/3-lock: requirements/cpu.lock $(STAMPS)/2-torch
	@echo "installing requirements/cpu.lock, which takes some minutes"; \
	$(PIP) install --no-deps -r requirements/cpu.lock && { \
		$(PIP) install --no-deps "$(PYCOSAT)" > $(VENV)/pycosat.log 2>&1 || { \
			echo "$(PYCOSAT) could not be compiled (see $(VENV)/pycosat.log): installing a stand-in, so that" \
				"reasoning-gym can be imported; its zebra puzzles will not run"; \
			$(PIP) install --no-deps --no-build-isolation requirements/pycosat_stand_in; \
		}; \
	} && $(STAMP)

$(STAMPS)/4-package: pyproject.toml $(STAMPS)/3-lock
	@echo "installing this package"; \
	$(PIP) install --no-deps --no-build-isolation --editable . && $(STAMP)
