# make run    build, fetch a small model, start a worker, stream one answer from it, stop it
# make test   build, fetch the model, run the tests        (ARGS="tests/cli -q" chooses)
# make check-long  fuzzing, soaking and random rounds, some 15 minutes; not part of `make test`
# make build  the virtual environment and the compiled extensions
# make lint   ruff, cython-lint, mypy
# make clean  remove everything the others made here (the model cache stays)
#
# PYTHON (3.11 or later) makes the environment; PROMPT is what `make run` asks.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
.PHONY: run test check-long build lint clean

PYTHON ?= python3
PROMPT ?= Why is the sky blue?
ARGS ?=
export PROMPT

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
SOURCES := $(shell find miro_cy -name '*.py[xd]' -o -name '*.pxi' -o -name '*.h')
REQUIREMENTS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	print(*p["build-system"]["requires"], *p["project"]["dependencies"], \
	*p["project"]["optional-dependencies"]["dev"], sep="\n")

build: $(VENV)/.built

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "miro needs Python 3.11 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# What the project needs to build, run and be tested, without the project: enough for `make lint`.
$(VENV)/.required: pyproject.toml $(VENV)/.created
	@$(BIN)/python -c '$(REQUIREMENTS)' >$(VENV)/requirements.txt
	@echo "Installing what miro needs into $(VENV)."
	$(PIP) -r $(VENV)/requirements.txt
	@touch $@

# Editable, so that Python changes need no rebuild. Without isolation it compiles with the environment's own Cython.
$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.required
	@echo "Compiling the extensions: this takes some minutes the first time."
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.built: $(SOURCES) $(VENV)/.installed
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

run: build
	@$(BIN)/miro pull smollm2
	@folder=$$(mktemp -d /tmp/miro-run.XXXXXX); endpoint="ipc://$$folder/miro.sock"; \
	$(BIN)/miro-worker --model smollm2 --bind "$$endpoint" >"$$folder/log" 2>&1 & worker=$$!; \
	trap 'kill "$$worker" 2>/dev/null || true; rm -rf "$$folder"' EXIT; \
	for ((i = 0; ; i++)); do \
		if grep -q '^ready ' "$$folder/log" 2>/dev/null; then break; fi; \
		if ((i == 600)) || ! kill -0 "$$worker" 2>/dev/null; then \
			echo "the worker did not start:" >&2; cat "$$folder/log" >&2; exit 1; \
		fi; \
		sleep 0.2; \
	done; \
	echo "> $$PROMPT"; \
	$(BIN)/miro run --connect "$$endpoint" "$$PROMPT" || { cat "$$folder/log" >&2; exit 1; }; \
	kill -TERM "$$worker"; \
	wait "$$worker" || { echo "the worker did not stop cleanly:" >&2; cat "$$folder/log" >&2; exit 1; }

test: build
	@$(BIN)/miro pull smollm2 || echo "No model: the tests that need it are skipped (in CI they fail)." >&2
	$(BIN)/python -m pytest $(ARGS)

check-long: build
	@$(BIN)/miro pull smollm2 || echo "No model: the soak is skipped (in CI it fails)." >&2
	$(BIN)/python -m pytest -m long tests/long $(ARGS)

# cython-lint looks for its pycodestyle on the PATH.
lint: $(VENV)/.required
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(BIN):$$PATH" cython-lint $(SOURCES:%.h=)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist client/build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./.git -prune -o -name '*.egg-info' -prune -exec rm -rf {} +
	find . -path ./.git -prune -o -name __pycache__ -prune -exec rm -rf {} +
	find miro_cy -name '*.so' -delete
