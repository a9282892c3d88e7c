# One command each, from a fresh clone with nothing installed but Python >= 3.11 and make.
#
#   make demo    set up, then run the demo: it checks its own claims
#   make test    set up, lint, then run every test (what .ci/run runs)
#   make lint    ruff and mypy alone
#   make bench   run the benchmarks in bench/, one after the other
#   make clean   remove the environment and every cache in this folder (not the fetched models)
#
# PYTHON       the interpreter that makes the environment:    make test PYTHON=python3.12
# TORCH_INDEX  package index that torch comes from, if not pip's own. On Linux PyPI's torch brings several GB of CUDA
#              libraries; the CPU build is smaller:  make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# WORKERS      processes that share the tests, one thread and about 2 GB of memory each:    make test WORKERS=8

PYTHON      ?= python3
TORCH_INDEX ?=
WORKERS     ?= 2

BIN   := .venv/bin
STAMP := .venv/.installed

# Idle OpenMP threads spin by default, and more threads than cores make every step wait for the slowest:
# on a small or shared machine that costs far more than it gains.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
PYTEST   := $(TEST_ENV) $(BIN)/python -m pytest

.PHONY: demo test lint bench setup clean

demo: $(STAMP)
	@echo "running the demo (the first time it fetches a model of 93 MB) ..."
	$(BIN)/anaphora demo

test: lint
	@echo "running the tests in $(WORKERS) processes (some minutes) ..."
	$(PYTEST) -m "not timing" -n $(WORKERS) --dist loadfile
	@echo "running the tests that look at the clock, alone ..."
	$(PYTEST) -m timing

lint: $(STAMP)
	@echo "checking style and types ..."
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	@set -e; for script in bench/*.py; do echo "== $$script"; OMP_WAIT_POLICY=PASSIVE $(BIN)/python "$$script"; done

setup: $(STAMP)

# The stamp is written last: an interrupted set-up runs again.
$(STAMP): pyproject.toml constraints.txt
	@echo "making the environment .venv ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing torch (200 MB; on Linux from PyPI several GB, see TORCH_INDEX) ..."
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	@echo "installing anaphora and what it needs (300 MB) ..."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf *.egg-info
