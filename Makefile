# make demo    the whole pipeline on a small real model and real chats, against a local S3 server
# make test    the test suite, or a part of it: make test PYTEST=tests/store
# make check   ruff and mypy
# make clean   delete what these have made
#
# Each needs only Python 3.11+ and make: what is missing is installed into .venv first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
QUIET_CORES := OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0

.PHONY: demo test check clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: asked for together with the rest, pip may fetch another build of it
$(VENV)/torch: constraints.txt | $(BIN)/python
	$(PIP) torch
	@touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/test: $(VENV)/torch pyproject.toml
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/demo

demo: $(VENV)/demo
	@$(QUIET_CORES) $(BIN)/python -m launch.demo

test: $(VENV)/test
	$(QUIET_CORES) $(BIN)/python -m pytest $(PYTEST)

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .cache .demo .pytest_cache .mypy_cache .ruff_cache
