# make demo    computes a prompt in one process and restores it in another
# make test    ruff, mypy, and the tests of what each part does, in two processes (JOBS=2): minutes
# make attack  the slow tests (whole servers, many cases), then what the store has to survive, bounded: crashes, power
#              loss, damage, crowds, outages, hostile bytes: twenty minutes
# make torture the same attacks at length: hours
# make models  what is saved for each model, through both doors, into docs/models.md: half an hour
# make docs    the documents as a site, in site/: every link checked, every snippet compiled or run
# make bench   our figures beside the peers', into benchmarks/results/ and docs/benchmarks.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

# the tests start some hundred processes, and pytest rewrites every assert: both are compiled once
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint attack torture models docs bench clean

demo: $(VENV)/.demo
	$(BIN)/prefixstore demo $(if $(MODEL),--model "$(MODEL)")

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --ignore tests/attacks -m 'not attack and not slow'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# alone: crowds of processes
ALONE := tests/attacks/test_crowd.py

attack: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --ignore $(ALONE) -m 'slow or attack'
	$(BIN)/python -m pytest $(ALONE)

torture: $(VENV)/.dev
	PREFIXSTORE_TORTURE=1 $(BIN)/python -m pytest --timeout=3600 -m attack
	PREFIXSTORE_TORTURE=1 $(BIN)/python -m pytest --timeout=3600 tests/models
	PREFIXSTORE_TORTURE=1 $(BIN)/python -m pytest --timeout=3600 -m 'hypothesis and not attack'

models: $(VENV)/.dev
	$(BIN)/python -m tests.models --write-docs

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest --quiet tests/test_docs.py tests/test_site.py

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

# llama-cpp-python comes as source: pip builds it with the C++ compiler, which takes a quarter of an hour on two cores.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV). pip may build llama-cpp-python: some 15 minutes on two cores, without a word."
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) site benchmarks/.cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
