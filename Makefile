# Every target prepares .venv by itself; nothing but python3 (3.11 or newer) and make is needed.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
DEMO := build/demo

.PHONY: help setup demo test test-full bench lint typecheck clean

help:
	@echo "make demo       synthesize a Llama trace set, verify it and show a summary"
	@echo "make test       lint, strict typing and the test suite"
	@echo "make test-full  the same with the tests that take minutes or need a package index"
	@echo "make bench      measure speed"
	@echo "make lint | typecheck | clean"

setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no python3 of version 3.11 or newer was found on PATH;" \
		"install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "setting up .venv with $(PYTHON) (once; a minute or two)" >&2; \
		rm -rf .venv; \
		$(PYTHON) -m venv .venv || { rm -rf .venv; \
			echo "error: '$(PYTHON) -m venv' failed (see above): this Python lacks venv or ensurepip;" \
			"install them (Debian, Ubuntu: apt install python3-venv), or name another: make PYTHON=/path/to/python3" >&2; \
			exit 1; }; }
	@$(PIP) --editable '.[dev]' && $(PIP) --no-deps 'mlc-chakra==1.0.0' || { \
		echo "error: pip could not install the dependencies (see above);" \
		"it needs a package index, and the next make tries again" >&2; exit 1; }
	@touch $@

demo: $(READY)
	@mkdir -p $(dir $(DEMO))
	$(BIN)/stage synth llama3-8b --gpus 8 --dp 2 --tp 2 --pp 2 --batch 8 --seq 4096 --out $(DEMO) --force
	$(BIN)/stage verify $(DEMO)
	$(BIN)/stage show $(DEMO)

# pytest comes last, so that its closing line is the last one printed.
test: lint typecheck
	@$(BIN)/python -m pytest -q -n auto

test-full: lint typecheck
	@$(BIN)/python -m pytest -q -n auto -m ""

bench: $(READY)
	@$(BIN)/python -m benchmarks.speed

lint: $(READY)
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .

typecheck: $(READY)
	@$(BIN)/mypy --no-error-summary

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
