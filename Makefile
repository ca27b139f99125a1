# make demo    computes a prompt in one process and restores it in another
# make test    everything that has to pass: ruff, mypy, pytest
# make bench   our figures beside the peers', into benchmarks/results/ and docs/benchmarks.md
# make torture the attacks of the tests, at length

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench torture clean

demo: $(VENV)/.demo
	$(BIN)/prefixstore demo $(if $(MODEL),--model "$(MODEL)")

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

torture: $(VENV)/.dev
	PREFIXSTORE_TORTURE=1 $(BIN)/python -m pytest --timeout=3600 tests/attacks tests/test_shared.py tests/engine/test_state_machine.py tests/backends/test_contract.py

# llama-cpp-python comes as source: pip builds it with the C++ compiler, which takes a quarter of an hour on two cores.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) benchmarks/.cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
