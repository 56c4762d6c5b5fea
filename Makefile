# make demo: install, and capture a small random model     make test: install, and everything that must pass
#
# TORCH says which torch is installed, and comes first, so that nothing else chooses a build; on a machine without
# a GPU, name a CPU build there to save gigabytes.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(STAMP) build/topics.jsonl
	$(BIN)/kimicap plan --config configs/demo.yaml
	$(BIN)/kimicap run --config configs/demo.yaml --overwrite
	$(BIN)/python -c "import kimicap; print(kimicap.open('demo.zarr'))"
	@echo "The capture lies in $(CURDIR)/demo.zarr"

test: lint
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.all

build/topics.jsonl: configs/topics.py $(STAMP)
	$(BIN)/python configs/topics.py

$(STAMP): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[test,plots]"
	touch $@

clean:
	rm -rf $(VENV) build demo.zarr
