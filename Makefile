# `make quickstart` installs everything, and trains and evaluates the main example; `make test` runs all checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev
RUN := runs/quickstart
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Bytecode is written, because ranks, environments and servers import lrl in separate processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: quickstart-steps quickstart quickstart-smollm2 smollm2 test test-fast test-offline test-all lint docs gpu clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==$(TORCH)"
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable ".[$(EXTRAS)]"
	$(PIP) --no-deps openenv  # only for its command; its dependencies conflict with the pins and are not needed
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[dev,bench]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[$(EXTRAS),docs]"
	touch $@

quickstart-steps:
	@echo "1. install lrl and its dependencies in $(VENV), unless this has been done: several gigabytes"
	@echo "2. train a language model of 1.6 million parameters on FrozenLake: 2 to 5 minutes on two CPU cores"
	@echo "3. evaluate it on 200 held-out episodes: less than a minute"

quickstart: quickstart-steps $(VENV)/.installed
	rm -rf $(RUN)
	$(BIN)/lrl fit --config configs/frozen_lake/grpo.yaml --run_directory $(RUN)
	$(BIN)/lrl evaluate --checkpoint $(RUN)/checkpoints/last.ckpt --json $(RUN)/evaluation.json
	$(BIN)/lrl report $(RUN)

smollm2: $(VENV)/.installed
	$(BIN)/lrl fetch smollm2

quickstart-smollm2: smollm2
	rm -rf $(RUN)-smollm2
	$(BIN)/lrl fit --config configs/frozen_lake/grpo_smollm2.yaml --run_directory $(RUN)-smollm2
	$(BIN)/lrl evaluate --checkpoint $(RUN)-smollm2/checkpoints/last.ckpt --json $(RUN)-smollm2/evaluation.json
	$(BIN)/lrl report $(RUN)-smollm2

# A larger young generation makes Node.js collect less often, which saves pyright some CPU time.
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	NODE_OPTIONS="--max-semi-space-size=64 $$NODE_OPTIONS" $(BIN)/pyright
	$(BIN)/lint-imports

test-fast: $(VENV)/.installed
	$(PYTEST) -m "not (slow or learning or distributed or gpu or reference or pretrained)"

# pyright uses one thread for a minute; the tests can use the other core at the same time.
test: $(VENV)/.installed
	$(MAKE) --no-print-directory --jobs 2 lint test-offline

test-offline: $(VENV)/.installed
	$(PYTEST) -m "not (gpu or reference or pretrained)"

test-all: lint $(VENV)/.installed-bench
	$(PYTEST) -m "not gpu"

# Needs a GPU and the bench extra, but no network; without $(VENV) it runs with $(PYTHON). It continues where it ended.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) scripts/benchmark.py gpu --seconds 36000 --json assets/results

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 --builder html docs docs/_build
	@echo "The front page is docs/_build/index.html"

clean:
	rm -rf $(VENV) runs docs/_build docs/api .pytest_cache .ruff_cache .import_linter_cache
