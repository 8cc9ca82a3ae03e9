# What a fresh clone needs is made on first use: .venv (this package and its tools) and .models (a small real model).
PYTHON ?= python3
MODEL ?= .models/SmolLM2-135M-Instruct
BIN := .venv/bin
# Where `make bench` measures: an existing folder on the drive. Default: where shards go.
DIR ?=

.PHONY: bench demo test test-slow test-floor mutants lint

demo: .venv/installed $(MODEL)
	$(BIN)/nvme-cache demo --model $(MODEL)

test: .venv/installed
	$(BIN)/python -m pytest

# Figures for docs/performance.md, into benchmarks/. ollm is a contender, not a dependency: only its cache is used.
bench: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps ollm==1.0.3
	$(BIN)/nvme-cache bench $(DIR) --out benchmarks

# Takes out every wait, event and keep-alive in turn and shows that the tests notice.
mutants: .venv/installed
	$(BIN)/python -m tests.adversarial.mutants

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# Tests of streams, drives, files and commands ask nothing more of transformers than the others. (Of keys and values of
# different dtypes the oldest makes one, so that the reference for quantized blocks would not hold there.)
NOT_ON_FLOOR := adversarial test_attention.py test_quantization.py test_quality.py test_bench.py test_benchmarks.py test_doctor.py \
	test_drive.py test_recycling.py test_memory.py test_snapshots.py test_snapshot_store.py test_remote_snapshots.py
test-floor: .venv-floor/installed
	.venv-floor/bin/python -m pytest $(NOT_ON_FLOOR:%=--ignore tests/%) -k "not int8"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The oldest transformers that pyproject.toml admits, all else as in .venv.
.venv-floor/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-floor
	sed 's/^transformers==.*/transformers==5.17.0/; /^huggingface_hub==/d' constraints.txt > .venv-floor/constraints.txt
	.venv-floor/bin/python -m pip install --quiet --constraint .venv-floor/constraints.txt --editable '.[dev]'
	touch $@

.models/SmolLM2-135M-Instruct: | .venv/installed
	mkdir -p .models
	$(BIN)/python examples/fetch_smollm2.py $@
