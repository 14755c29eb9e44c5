# Needs Python 3.11 or later; everything else is installed into .venv.
PYTHON ?= python3
# More arguments for `make serve` and `make test`, such as ARGS="--workers 2".
ARGS ?=

BIN := .venv/bin
# Installs what is missing, and costs 50 ms where nothing is.
SET_UP := $(PYTHON) .ci/set_up.py
PROTO_IMAGE := build/protos.binpb

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup kernels dist docs sbom release lock bench gpu serve cluster test test-isa test-torch explore soak size check check-types check-code check-protos check-imports fmt stubs proto-image clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: kernels ## Install everything into .venv (the other targets do it themselves)
	@$(SET_UP) test

# Quick where they are compiled already; a compiler may have come since.
kernels: ## Compile the kernels for this CPU
	@$(SET_UP) serve
	@$(BIN)/python -m kernels.cpu.library

dist: ## Build the wheels, with kernels for all CPUs, into dist/: who installs them needs no compiler
	@$(SET_UP) release
	@PYTHONPATH=. $(BIN)/python .ci/build_wheels.py dist $(ARGS)

docs: ## Build the manual: build/manual/index.html
	@$(SET_UP) docs
	@# Not --quiet: then warnings are no errors. The variable turns off an announcement of the theme.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

sbom: ## List what the installed server consists of, as CycloneDX JSON: build/sbom.json
	@$(SET_UP) test
	@$(SET_UP) release
	@$(BIN)/python .ci/sbom.py build/sbom.json

release: dist docs sbom ## Build what is published into dist/, and try the wheels in empty environments of each Python
	@cp build/sbom.json dist/sbom.json
	@tar -czf dist/manual.tar.gz -C build manual
	@$(BIN)/python .ci/try_wheels.py dist

lock: ## Write requirements.lock: what a server installs, with hashes
	@$(SET_UP) release
	@$(BIN)/python .ci/lock_file.py

serve: kernels ## Serve the shipped model on 127.0.0.1:50051 (ARGS="--model DIR --workers 2 ...")
	@exec $(BIN)/quire serve $(ARGS)

# As on several hosts, but over loopback: each worker has half of the cores.
cluster: kernels ## Serve with two workers as if they were on other hosts (docs/scaling.md)
	@test -d build/pool || $(BIN)/quire pool init build/pool >/dev/null
	@trap 'kill $$workers 2>/dev/null; wait' EXIT; trap exit INT TERM; workers=; threads=$$(( ($$(nproc) + 1) / 2 )); \
	for number in 1 2; do \
	  $(BIN)/quire worker --pool build/pool --gateway 127.0.0.1:50060 --threads $$threads & workers="$$workers $$!"; \
	done; \
	$(BIN)/quire serve --pool build/pool --pool-listen 127.0.0.1:50060 --workers 2 $(ARGS)

# A process more than there are cores, since tests of several servers wait for them, and four at most (one with
# ARGS="-n 0"); who has nothing left takes from another. The variable, which images set, would have hundreds of
# processes compile what they import.
test: setup ## Run all tests (ARGS="tests/service -k fencing ...")
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 4 --dist worksteal $(ARGS)

# In an environment of its own, with the Triton that this torch needs. Compiled kernels are not of a
# torch.
TORCH ?= 2.11.0
TORCH_TESTS := tests/kernels tests/workers tests/gpu $(patsubst %,tests/e2e/test_%.py,parity_machine library_backend \
  same_bits hidden_states tensor_parallel)
OTHER = build/torch-$(TORCH)
OTHER_INSTALL = $(OTHER)/bin/python -m pip --disable-pip-version-check install --quiet
test-torch: kernels ## Run the tests that depend on torch with another version, 20 minutes (TORCH=2.14.1 PYTHON=python3.12)
	@test -d $(OTHER) || $(PYTHON) -m venv $(OTHER)
	@grep -v '^torch==\|^triton==' constraints.txt >$(OTHER)/constraints.txt; echo torch==$(TORCH) >>$(OTHER)/constraints.txt
	$(OTHER_INSTALL) 'setuptools>=80' torch==$(TORCH)
	$(OTHER_INSTALL) --constraint $(OTHER)/constraints.txt --no-build-isolation --editable clients/python --editable '.[dev]'
	$(OTHER)/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(TORCH_TESTS) $(ARGS)

test-isa: setup ## Run the tests that depend on the CPU with other instruction sets, 10 minutes (ARGS="-k linear")
	$(BIN)/python -m tests.isa $(ARGS)

# llama.cpp takes minutes to build, and is one competitor of several: without it its rows say so.
bench: setup ## Measure against transformers and llama.cpp, 15 minutes (ARGS="--rows decode-32 --minutes 5")
	@$(SET_UP) bench || echo 'llama.cpp could not be built' >&2
	@$(BIN)/python -m benchmarks.run $(ARGS)

explore: setup ## Look for failures with new seeds, for an hour (ARGS="--minutes 10 --only simulator --seed 7")
	$(BIN)/python -m tests.explore $(ARGS)

soak: setup ## Kill, stop and crash workers and gateway under callers, for an hour (ARGS="--faults 100 --minutes 5")
	$(BIN)/python -m tests.soak $(ARGS)

size: setup ## Show how long the code is, and what a Decode goes through and costs (ARGS="--functions 20")
	$(BIN)/python -m benchmarks.size $(ARGS)

# On a machine with a GPU: nothing is installed. A copy without history is told its commit: make gpu COMMIT=...
OUT ?= build/gpu
gpu: ## Test and measure on a GPU, 8 minutes (OUT=DIR ARGS="--only model --minutes 4")
	$(PYTHON) -m tests.gpu.first --out $(OUT) $(if $(COMMIT),--commit $(COMMIT)) $(ARGS)

# In seconds, with tools alone. Types need all that the code imports, torch among it.
check: check-code check-protos check-imports ## Check style, protos, import rules, and types where they can be; changes nothing
	@if $(SET_UP) test --has; then $(BIN)/mypy; else echo 'Types are not checked: `make check-types` installs 2.5 GB for that'; fi

check-types: ## Check types
	@$(SET_UP) test
	$(BIN)/mypy

check-code:
	@$(SET_UP) check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-protos:
	@$(SET_UP) check
	PYTHONPATH=clients/python $(BIN)/python protos/generate.py --check
	$(BIN)/python clients/python/generate_blocking.py --check
	PYTHONPATH=clients/python $(BIN)/python protos/generate.py --image $(PROTO_IMAGE)
	$(BIN)/buf lint $(PROTO_IMAGE) --config protos/buf.yaml
	$(BIN)/buf format protos --diff --exit-code
	! test -f protos/released.binpb || $(BIN)/buf breaking $(PROTO_IMAGE) --against protos/released.binpb --config protos/buf.yaml

check-imports:
	@$(SET_UP) check
	$(BIN)/python -m pytest -q tests/test_architecture.py

fmt: ## Format the code and the protos
	@$(SET_UP) check
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/buf format protos --write

stubs: ## Generate the Python stubs from protos/, the blocking client, and pages of the manual
	@$(SET_UP) test
	$(BIN)/python protos/generate.py
	$(BIN)/python clients/python/generate_blocking.py
	PYTHONPATH=. $(BIN)/python .ci/settings_page.py docs/settings.md
	$(BIN)/python .ci/python_page.py docs/python.md

proto-image: ## Record the protos of a release, with which check-protos compares later ones; for releases only
	@$(SET_UP) test
	$(BIN)/python protos/generate.py --image protos/released.binpb --without-comments

clean: ## Remove build outputs and caches; keeps .venv
	rm -rf build dist kernels/cpu/build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info clients/python/*.egg-info \
	  clients/python/build
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
