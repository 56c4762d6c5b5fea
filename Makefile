# make demo: install, and capture a small random model
# make test: install twice, and everything that must pass, under the newest transformers and under the one that
#            Kimi-K3's own code needs;  make test-5, make test-4.57: either alone
#
# TORCH says which torch is installed, and comes first, so that nothing else chooses a build; on a machine without
# a GPU, name a CPU build there to save gigabytes. It has no effect on an environment that is there: `make clean` first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OLD_VENV ?= .venv-4.57
BIN := $(VENV)/bin
OLD_BIN := $(OLD_VENV)/bin
STAMP := $(VENV)/.installed
OLD_STAMP := $(OLD_VENV)/.installed

.PHONY: demo test test-5 test-4.57 lint bench clean
.DELETE_ON_ERROR:

# Where other work shares the cores, threads wait for each other: on two busy ones the demo's run took 120 s with two
# threads and 23 s with one.
demo test: export OMP_NUM_THREADS ?= 1

demo: $(STAMP) build/topics.jsonl
	$(BIN)/kimicap plan --config configs/demo.yaml
	$(BIN)/kimicap run --config configs/demo.yaml --overwrite
	$(BIN)/python -c "import kimicap; print(kimicap.open('demo.zarr'))"
	@echo "The capture lies in $(CURDIR)/demo.zarr"

test: lint test-5 test-4.57

test-5: $(STAMP)
	$(BIN)/python -m pytest -q

test-4.57: $(OLD_STAMP)
	$(OLD_BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.all

build/topics.jsonl: configs/topics.py $(STAMP)
	$(BIN)/python configs/topics.py

$(STAMP): TRANSFORMERS := transformers>=5.24
$(OLD_STAMP): TRANSFORMERS := transformers==4.57.6
$(STAMP) $(OLD_STAMP): pyproject.toml
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(TORCH)
	$(@D)/bin/python -m pip install --quiet --config-settings editable_mode=compat --editable ".[test,plots]" "$(TRANSFORMERS)"
	touch $@

clean:
	rm -rf $(VENV) $(OLD_VENV) build demo.zarr
