# Only Python 3.10 to 3.13 is needed: each target creates .venv and installs its dependencies.
#
#   make demo PYTHON=python3.12
#   make demo TORCH_INSTALL_ARGS="--index-url ..."    # if pip needs another index for a CPU build of torch
#
# An unpinned torch installs gigabytes of CUDA packages, so torch is installed first, at the version of constraints.txt.
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and pip's own configuration apply.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH_INSTALL_ARGS ?=
PYTEST_ARGS ?=
VERSIONS_ARGS ?=
DEMO_ARGS ?=
FUZZ_ARGS ?=
SCRIPT_ARGS ?=
BENCH_ARGS ?=
GUARD_ARGS ?=
PROGRAM_ARGS ?= --count 5000
ZOO_ARGS ?=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
STAMPS := $(VENV)/.stamps

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-integrations test-browser test-scripts test-versions test-plain docs conformance programs guard fuzz zoo check format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/demo  ## train small models in fp32, under torch.autocast and with amp_graph (under 5 minutes)
	$(VENV)/bin/python -m examples.demo $(DEMO_ARGS)

test: $(STAMPS)/test  ## run the tests, without the long ones
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not integration and not browser" $(PYTEST_ARGS) < /dev/null

test-long: $(STAMPS)/test  ## run the long tests
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m slow $(PYTEST_ARGS)

test-integrations: $(STAMPS)/test $(STAMPS)/integrations  ## run the tests with Lightning, transformers' Trainer, accelerate and peft
	$(VENV)/bin/python -m pytest -n 2 -m integration -rs tests/integrations $(PYTEST_ARGS)

test-browser: $(STAMPS)/test $(STAMPS)/browser $(STAMPS)/docs  ## open, search and click reports and the site in Chromium (apt-get install chromium chromium-driver)
	$(VENV)/bin/python -m pytest -m browser -rs tests/browser $(PYTEST_ARGS)

test-scripts: $(STAMPS)/demo  ## train published scripts in fp32, under torch.autocast and with amp-graph run
	$(VENV)/bin/python -m tests.run.third_party $(SCRIPT_ARGS)

test-versions: $(STAMPS)/test  ## run the tests with other versions of Python and torch, each in an environment of its own
	$(VENV)/bin/python -m tests.versions --folder .versions $(VERSIONS_ARGS)

test-plain: $(STAMPS)/test  ## run the tests as on a CPU without AVX and without a C compiler; PLAIN_ARGS=--compiler keeps that
	$(VENV)/bin/python -m tests.versions.plain_cpu -n 2 $(PLAIN_ARGS)

conformance: $(STAMPS)/test  ## compare every operator of PyTorch's operator database with eager mode and autocast
	AMP_GRAPH_CONFORMANCE=all $(VENV)/bin/python -m pytest -n 2 tests/conformance/test_operators.py $(PYTEST_ARGS)

programs: $(STAMPS)/test  ## compare random programs, and chains into ill-conditioned operations, with autocast
	$(VENV)/bin/python -m tests.random_programs $(PROGRAM_ARGS)
	$(VENV)/bin/python -m tests.random_chains

guard: $(STAMPS)/test  ## run all compiled C between guard pages, over odd and empty sizes
	$(VENV)/bin/python -m tests.guard.run $(GUARD_ARGS)

fuzz: $(STAMPS)/test  ## check that random changes of each file format and state are accepted or refused
	$(VENV)/bin/python -m tests.fuzz $(FUZZ_ARGS)

zoo: $(STAMPS)/demo $(STAMPS)/zoo  ## train 400 models of other packages in bf16 and fp16 (hours; what is measured is not run again)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.zoo $(ZOO_ARGS)

check: $(STAMPS)/dev  ## check lint rules, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/check
	$(PIP) install --quiet --no-deps --target build/check .
	cd build/check && "$(abspath $(VENV))/bin/mypy" --config-file "$(abspath pyproject.toml)" -p amp_graph

format: $(STAMPS)/dev  ## format the code and fix lint errors
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(STAMPS)/docs  ## build the documentation site into build/site; a dead link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "open build/site/index.html"

bench: $(STAMPS)/demo  ## measure nine models against torch.autocast (BENCH_ARGS="--scale 0.5 --output mine")
	$(VENV)/bin/python benchmarks/speed.py $(BENCH_ARGS)
	$(VENV)/bin/python benchmarks/page_tables.py

clean:  ## remove .venv, builds, caches and the demo's output
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
