# What a fresh clone needs is made on first use: .venv (this package and its tools) and .models (a small real model).
PYTHON ?= python3
MODEL ?= .models/SmolLM2-135M-Instruct
BIN := .venv/bin

.PHONY: demo test lint

demo: .venv/installed $(MODEL)
	$(BIN)/nvme-cache demo --model $(MODEL)

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.models/SmolLM2-135M-Instruct: | .venv/installed
	mkdir -p .models
	$(BIN)/python examples/fetch_smollm2.py $@
