# A bare machine with Python 3.10 to 3.13 is enough: each target makes .venv and installs what it needs.
#
#   make demo PYTHON=python3.12
#   make demo TORCH_INSTALL_ARGS="--index-url ..."    # where pip must be told about a CPU build of torch
#
# An unpinned torch brings gigabytes of CUDA packages, so torch goes in first, at the version of constraints.txt.
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and pip's own configuration are respected as they are.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH_INSTALL_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
FUZZ_ARGS ?=
BENCH_ARGS ?=
GUARD_ARGS ?=
PROGRAM_ARGS ?= --count 5000

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
STAMPS := $(VENV)/.stamps

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long conformance programs guard fuzz check format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/demo  ## train small models on real data, side by side with torch.autocast (under 5 minutes)
	$(VENV)/bin/python -m amp_graph.demo $(DEMO_ARGS)

test: $(STAMPS)/test  ## run the test-suite without the long sweeps
	$(VENV)/bin/python -m pytest -n 2 -m "not slow" $(PYTEST_ARGS) < /dev/null

test-long: $(STAMPS)/test  ## run the long sweeps
	$(VENV)/bin/python -m pytest -n 2 -m slow $(PYTEST_ARGS)

conformance: $(STAMPS)/test  ## run every operator of PyTorch's own database, converted, against eager and autocast
	AMP_GRAPH_CONFORMANCE=all $(VENV)/bin/python -m pytest -n 2 tests/conformance/test_operators.py $(PYTEST_ARGS)

programs: $(STAMPS)/test  ## run 5,000 random programs, converted, against eager and autocast
	$(VENV)/bin/python -m tests.random_programs $(PROGRAM_ARGS)

guard: $(STAMPS)/test  ## run all compiled C between pages that nobody may touch, over odd and empty sizes
	$(VENV)/bin/python -m tests.guard.run $(GUARD_ARGS)

fuzz: $(STAMPS)/test  ## 20,000 made-up policies, lists, input specs and machine files: each taken, or refused as promised
	$(VENV)/bin/python -m tests.fuzz $(FUZZ_ARGS)

check: $(STAMPS)/dev  ## lint, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/check
	$(PIP) install --quiet --no-deps --target build/check .
	cd build/check && "$(abspath $(VENV))/bin/mypy" --config-file "$(abspath pyproject.toml)" -p amp_graph

format: $(STAMPS)/dev  ## format the code and repair what the linter can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(STAMPS)/demo  ## measure training and inference of nine models against torch.autocast (BENCH_ARGS="--scale 0.5 --output mine")
	$(VENV)/bin/python benchmarks/speed.py $(BENCH_ARGS)
	$(VENV)/bin/python benchmarks/page_tables.py

clean:  ## remove .venv, caches and results
	rm -rf $(VENV) build dist demo_output *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/torch: $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 13) else \
		"Python 3.10 to 3.13 is needed, $(PYTHON) is %s.%s; choose another: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	$(PIP) install --quiet $(TORCH_INSTALL_ARGS) -c constraints.txt torch
	touch $@

$(STAMPS)/%: $(STAMPS)/torch $(INPUTS)
	$(PIP) install --quiet -c constraints.txt -e ".[$*]"
	touch $@
