# Everything starts here: each target makes .venv itself and reuses it afterwards.
#   make demo     a demonstration: peers on this machine train a model on real text, then answer a prompt
#   make check    lint, types and every quick test that starts no process
#   make test     the gate: check, real peers, one kill of each kind, emulated networks (docs/testing.md)
#   make test-all  every test: two hours and more
#   make bench    benchmarks of training and decoding, as a table and bench-results.json
#   make bench-serve    benchmarks of serving: concurrent users, slow links, load (root for the links)
#   make bench-network  training over slow links (root, Linux): docs/network.md; a stopped run resumes
#   make what-if  plans for fifty consumer GPUs against four of a data centre: docs/what-if.md, in under five minutes
#   make chaos    peers on this machine train and are killed meanwhile; the result is compared with a quiet run
#   make worlds   the protocol in 100 000 simulated worlds with faults (WORLDS=, SEED=)
#   make pictures  docs/pictures from real runs: the demo, a status, a minute of chaos (about ten minutes)
#   make models   docs/models.md: how each text family of transformers is served (half an hour; a stopped run resumes)
#   make sweep    each kind of fault in each phase: kills, frozen peers, cold starts, departures, a partition; placements
# PYTHON=python3.12 picks an interpreter (3.11 or newer). PIP_ARGS is handed to pip, for a mirror or an index of its own.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)

# One thread a process: peers that share a machine must not fight over its cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

# Workers and peers would each compile every module anew, half of the time of collecting.
unexport PYTHONDONTWRITEBYTECODE

SEED ?= 1
WORLDS ?= 100000

.PHONY: help demo check test test-all bench bench-serve bench-network what-if chaos pictures models sweep worlds lint format clean install

help:
	@sed -n 's/^#   //p' Makefile

# The demo stops with the process that started it (`make` here), even where that one is killed outright.
demo: $(VENV)/.installed
	@exec $(BIN)/fusion-peer demo --stop-with $$PPID $(ARGS)

# One test more than there are cores, as those that start processes wait for them, four at most; of check, which starts none, as
# many as there are cores, three at most. Lint and types are tests as well (tests/test_lint.py).
CORES := $(shell $(PYTHON) -c 'import os; print(min(3, os.cpu_count()))')
check: WORKERS ?= $(CORES)
WORKERS ?= $(shell expr $(CORES) + 1)
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

check: $(VENV)/.installed-dev .typing/fusion
	@exec $(PYTEST) -m "not process and not heavy and not slow" $(ARGS)

test: $(VENV)/.installed-dev .typing/fusion
	@exec $(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev .typing/fusion
	@exec $(PYTEST) $(ARGS)

lint: $(VENV)/.installed-dev .typing/fusion
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@exec $(BIN)/python tests/bench $(ARGS)

# For example: make bench-serve ARGS="--only wan,first --rounds 1"
bench-serve: $(VENV)/.installed-dev
	@exec $(BIN)/python tests/bench/serve.py $(ARGS)

# For example: make bench-network ARGS="--networks C --rounds 1 --curves --minutes 30"
bench-network: $(VENV)/.installed-dev
	@exec $(BIN)/python tests/bench/network.py $(ARGS)

# For example: make what-if ARGS="--folder /tmp --mbps 100,1000"
what-if: $(VENV)/.installed-dev
	@exec $(BIN)/python tests/bench/what_if.py $(ARGS)

# For example: make chaos ARGS="--minutes 5 --seed 7 --json"
chaos: $(VENV)/.installed
	@exec $(BIN)/fusion-peer chaos --stop-with $$PPID $(ARGS)

# For example: make models ARGS="--only llama,bloom"; what is known already, in models.json, is not tried again.
models: $(VENV)/.installed-dev
	@exec $(BIN)/python tests/families $(ARGS)

pictures: $(VENV)/.installed
	@exec $(BIN)/python docs/pictures.py $(ARGS)

# Every part with the same SEED; each also runs alone (python tests/sweeps/training.py --help). Without root the
# partition, which needs network namespaces, says that it is skipped.
sweep: $(VENV)/.installed-dev
	$(BIN)/python tests/sweeps/training.py --kills 42 --seed $(SEED) --json sweep-training.json
	$(BIN)/python tests/sweeps/answers.py --kills 100 --together-kills 20 --seed $(SEED) --json sweep-answers.json
	$(BIN)/python tests/sweeps/frozen.py --seed $(SEED) --json sweep-frozen.json
	$(BIN)/python tests/sweeps/cold_start.py --seed $(SEED) --json sweep-cold-start.json
	$(BIN)/python tests/sweeps/departures.py --seed $(SEED)
	$(BIN)/python tests/sweeps/partition.py
	$(BIN)/python tests/sweeps/placement.py --seed $(SEED) --json sweep-placement.json

worlds: $(VENV)/.installed-dev
	@exec $(BIN)/python tests/worlds --worlds $(WORLDS) --seed $(SEED) $(ARGS)

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) .typing build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench-results.json bench-serve.json models.json sweep-*.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after pip has finished, so an interrupted install is taken up again.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing Fusion Peer into $(VENV) (once; PyTorch is most of it) ..."
	@$(PIP) -e '.[peer]'
	@touch $@

# Modules are compiled when they are first imported: most of what the checks bring along never is.
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing Fusion Peer and its checks into $(VENV) (once) ..."
	@$(PIP) --no-compile -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "Fusion Peer needs Python 3.11, 3.12 or 3.13 (PYTHON=... names one)." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; \
		rm -rf $(VENV); exit 2; }
	@$(PIP) --upgrade pip || true  # that of an older Python takes half a minute more to choose versions

.typing/fusion:
	@mkdir -p .typing && ln -sfn .. $@
