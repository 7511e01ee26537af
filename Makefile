# Each target makes the environment in .venv first where there is none, and again where setup.py or requirements/ changed;
# bench has one of its own, .venv-bench.
# It needs Python >= 3.10 with its venv module: python3, or another with `make PYTHON=python3.12 demo`.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
BENCH_BIN := .venv-bench/bin
BENCH_INSTALLED := .venv-bench/installed

.DELETE_ON_ERROR:
.PHONY: help demo demo-ddp test test-long test-all test-gpu chaos bench check pictures clean

help: ## these lines
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

demo: $(INSTALLED) ## the example's sweep: two learning rates, side by side; the files go to multirun/
	$(BIN)/python example_app/train.py -m lr=1e-3,1e-4 hydra/launcher=gpu_pool

demo-ddp: $(INSTALLED) ## the same, each job a group of two ranks, on CPU ranks where there are no GPUs
	$(BIN)/python example_app/train.py -m lr=1e-3,1e-4 hydra/launcher=ddp

# A file's tests stay together: they share sweeps.
SIDE_BY_SIDE := -n 2 --dist loadfile

test: $(INSTALLED) ## the tests, in this one environment, but for those that take long
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not long"

test-long: $(INSTALLED) ## those that take long: they train, or run thousands of jobs, or import torch again and again
	$(BIN)/pytest $(SIDE_BY_SIDE) -m long

test-gpu: $(INSTALLED) ## the tests that need a real GPU
	$(BIN)/pytest -m gpu

test-all: $(INSTALLED) ## all tests, in every environment of tox; needs Python 3.10 to 3.13 on PATH
	$(BIN)/tox run

MINUTES ?= 20

chaos: $(INSTALLED) ## sweeps whose processes are killed at random, and resumed, for MINUTES=20
	$(BIN)/python tests/chaos.py --minutes $(MINUTES)

# What its name begins with an underscore for is there for the others.
BENCHMARKS := $(filter-out benchmarks/_%.py benchmarks/table.py,$(wildcard benchmarks/*.py))
QUICK ?=
RESULTS := benchmarks/results$(if $(QUICK),/quick)

bench: $(BENCH_INSTALLED) ## speed and memory, beside what else there is; under 20 minutes on 2 cores, QUICK=--quick for a try
	@$(BENCH_BIN)/python -m compileall -q hydra_plugins  # as pip leaves an installed package, and so the peers
	@mkdir -p $(RESULTS)
	@failed=; for program in $(BENCHMARKS); do \
	  $(BENCH_BIN)/python $$program $(QUICK) --json $(RESULTS)/$$(basename $$program .py).json || failed="$$failed $$program"; \
	done; test -z "$$failed" || { echo "these have failed:$$failed" >&2; exit 1; }
	@$(BENCH_BIN)/python benchmarks/table.py $(RESULTS)

check: $(INSTALLED) ## types, lint, format
	$(BIN)/mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check

pictures: $(INSTALLED) ## the README's, of a sweep of half a minute; needs a chromium
	$(BIN)/python tests/pictures.py

clean: ## remove what these targets made, the environment and the sweeps' outputs included
	rm -rf .venv .venv-bench .tox build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf multirun outputs benchmarks/results
	find hydra_plugins tests example_app benchmarks -name __pycache__ -prune -exec rm -rf {} +

# Without the stamp, an environment is new or was left half made: begin anew, since pip trusts what an interrupted pip left
# there. setuptools comes first, and builds in this environment, so that the version that builds is pinned as well.
$(INSTALLED): VENV := .venv
$(INSTALLED): WITH := -c requirements/constraints.txt
$(INSTALLED): PACKAGES := -e '.[dev,example,clients,browser]'
$(BENCH_INSTALLED): VENV := .venv-bench
$(BENCH_INSTALLED): WITH := -c requirements/pins.txt
$(BENCH_INSTALLED): PACKAGES := -r requirements/bench.txt -e .
$(INSTALLED): $(wildcard requirements/constraints*.txt)
$(BENCH_INSTALLED): requirements/bench.txt
$(INSTALLED) $(BENCH_INSTALLED): setup.py requirements/pins.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "gpu_pool needs Python 3.10 or newer, and $(PYTHON) is not: name one, as in make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv module (on Debian: python3-venv)" >&2; exit 1; }
	@test -e $@ || { echo "making $(VENV), once; this takes a minute or two"; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $@
	@$(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(WITH) setuptools
	@$(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(WITH) \
	  --use-pep517 --no-build-isolation $(PACKAGES)
	@touch $@
