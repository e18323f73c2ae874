# make run    build, fetch a small model, start a worker, stream one answer from it, stop it
# make test   build, fetch the model, run the tests        (ARGS="tests/cli -q" chooses)
# make check-long  fuzzing, soaking and random rounds, under 15 minutes; not part of `make test`
# make debug       the debug build, in build/debug/lib; `make test-debug ARGS=tests/cache` runs tests against it
# make check-hostile  the part of check-long that loads thousands of damaged models, on the debug build
# make debug-asan  one that watches memory (AddressSanitizer) in build/sanitized/lib, and the tests that need it
# make build  the virtual environment and the compiled extensions
# make lint   ruff, cython-lint, mypy
# make clean  remove everything the others made here (the model cache stays)
#
# PYTHON (3.11 or later) makes the environment; PROMPT is what `make run` asks.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
.PHONY: run test check-long check-hostile debug test-debug debug-asan build lint clean

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

# Editable, so that Python changes need no rebuild; the extensions come next, compiled with the environment's own Cython.
$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.required
	MIRO_NO_EXTENSIONS=1 $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.built: $(SOURCES) $(VENV)/.installed
	@echo "Compiling the extensions: this takes some minutes the first time."
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

check-long: build check-hostile
	@$(BIN)/miro pull smollm2 || echo "No model: the soak is skipped (in CI it fails)." >&2
	$(BIN)/python -m pytest -m long tests/long --ignore tests/long/test_fuzz_models.py $(ARGS)

# Hostile files, on the build that notices.
check-hostile: debug
	$(call WITH,debug) $(BIN)/python -m pytest -m long tests/long/test_fuzz_models.py -rP

# Another build than the one beside the sources, which a safe path keeps out. Tests say which they run with, and refuse
# another than MIRO_TEST_BUILD.
WITH = MIRO_TEST_BUILD=$(1) PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/build/$(1)/lib"

debug: $(VENV)/.required
	MIRO_DEBUG=1 $(BIN)/python setup.py --quiet build

test-debug: debug
	$(call WITH,debug) $(BIN)/python -m pytest --timeout 600 $(ARGS)

# C++ libraries must find the sanitizer's handlers of exceptions, hence libstdc++. Python never frees all it has.
GCC_LIBRARY = $(shell gcc -print-file-name=$(1) 2>/dev/null)
ASAN_TESTS := tests/test_native.py tests/cache tests/sched tests/sampling tests/formats tests/kernels tests/engine \
	tests/model/test_engine_lifecycle.py

debug-asan: $(VENV)/.required
	@[[ "$(call GCC_LIBRARY,libasan.so)" == /* ]] \
		|| { echo "make debug-asan needs gcc and its libasan.so, which is not there (Debian: libgcc-N-dev)" >&2; exit 1; }
	MIRO_DEBUG=1 MIRO_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build
	$(call WITH,sanitized) PYTHONMALLOC=malloc LD_PRELOAD="$(call GCC_LIBRARY,libasan.so) $(call GCC_LIBRARY,libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/python -m pytest -m "not model and not long" --timeout 600 $(or $(ARGS),$(ASAN_TESTS))

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
