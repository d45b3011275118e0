# On a machine with Python 3.11 and make alone:
#   make run    a step-size study on both backends: table, records and figures in out/quickstart
#   make test   the tests that take less than ten seconds each
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint types clean

run: .venv/installed
	$(BIN)/contadj converge --config experiments/quickstart.toml

test: .venv/installed
	$(BIN)/python -m pytest -m "not slow" -n 2

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/pyright --pythonpath $(BIN)/python

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out
