# Needs Python 3.11 or later; everything else is installed into .venv.
PYTHON ?= python3
# More arguments for `make serve` and `make test`, such as ARGS="--workers 2".
ARGS ?=

BIN := .venv/bin
# What pip says, some 200 lines, is shown where it fails.
PIP_LOG := .venv/pip.log
INSTALL = $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt $(1) \
  >$(PIP_LOG) 2>&1 || { cat $(PIP_LOG) >&2; false; }
# Python compiles what it imports at the first start, a fourth of what is installed. Without leave to keep that, each start would.
NO_COMPILE = $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# Changes with what has to be installed, so that an unchanged environment costs nothing.
REQUIREMENTS := constraints.txt pyproject.toml clients/python/pyproject.toml
STATE := $(shell cat $(REQUIREMENTS) | cksum | tr ' ' '-')
# What serving needs, and beside it what tests and checks need.
SERVING := .venv/serving-$(STATE)
INSTALLED := .venv/installed-$(STATE)
BENCH_INSTALLED := .venv/bench-$(notdir $(INSTALLED))
PROTO_IMAGE := build/protos.binpb
GPU := $(shell command -v nvidia-smi)
# Triton, 700 MB, is for GPUs and for tests.
SERVED := .$(if $(GPU),[cuda])
PINNED_TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
# Whether pip would install libraries of CUDA, 3 GB, for no GPU. uv knows PyTorch's own index, which has a torch without.
NEEDS_UV = test -z "$(GPU)" && $(BIN)/python -m pip install --dry-run --constraint constraints.txt $(PINNED_TORCH) \
  2>/dev/null | grep -q '^Would install.* nvidia-'
UV_TORCH = { $(BIN)/python -m pip install --constraint constraints.txt uv && $(BIN)/python -m uv pip install \
  --python $(BIN)/python --torch-backend cpu --constraint constraints.txt $(PINNED_TORCH); } >$(PIP_LOG) 2>&1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup kernels dist docs sbom bench gpu serve cluster test test-isa test-torch explore soak size check check-code check-types check-protos check-imports fmt stubs proto-image clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) kernels ## Install everything into .venv (the other targets do it themselves)
	@:

# Two makes at once would clear each other's .venv: the second one waits, and then finds it done.
ifndef VENV_LOCKED
$(SERVING) $(INSTALLED) $(BENCH_INSTALLED):
	@$(PYTHON) .ci/lock_venv.py $(MAKE) --silent --no-print-directory VENV_LOCKED=yes $@
else

# An environment without its mark was interrupted half-way: it is made anew. One with an older mark is updated.
$(SERVING):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or later is needed: make PYTHON=python3.12 ...' >&2; exit 1; }
	@# In an older environment the command `quire` is the server's. Upgrading that would remove the client's.
	@if ls .venv/serving-* >/dev/null 2>&1; then $(BIN)/python -m pip uninstall --quiet --yes quire-llm-server; \
	  else echo 'Creating .venv'; $(PYTHON) -m venv --clear .venv; fi
	@rm -f .venv/serving-* .venv/installed-*
	@echo 'Installing torch, most of what is downloaded (details in $(PIP_LOG))'
	@if ! { $(NEEDS_UV); }; then echo '  $(if $(GPU),for CUDA,for the CPU)'; \
	  elif echo '  for the CPU, by uv: there is no nvidia-smi'; ! $(UV_TORCH); then \
	    echo '  with the libraries of CUDA after all: uv cannot get the other one'; fi
	@$(call INSTALL,$(NO_COMPILE) setuptools $(PINNED_TORCH))
	@echo 'Installing Quire and what else it needs'
	@# The kernels are compiled meanwhile; what hinders that is told when they are asked for.
	@$(BIN)/python -m kernels.cpu.library >/dev/null 2>&1 & \
	  $(call INSTALL,$(NO_COMPILE) --no-build-isolation --editable clients/python --editable '$(SERVED)'); \
	  installed=$$?; wait; exit $$installed
	@touch $@

$(INSTALLED): $(SERVING)
	@echo 'Installing what tests and checks need'
	@$(call INSTALL,--no-build-isolation --editable '.[dev]')
	@# In tests a warning while something is compiled would be an error.
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

# llama.cpp takes minutes to build, and is one competitor of several: without it its rows say so.
$(BENCH_INSTALLED): $(INSTALLED)
	@echo 'Building llama.cpp, which takes minutes'
	@CMAKE_ARGS=-DLLAVA_BUILD=OFF $(call INSTALL,--editable '.[bench]') && touch $@ \
	  || echo 'llama.cpp could not be built' >&2

endif

# Quick where they are compiled already; a compiler may have come since.
kernels: $(SERVING)
	@$(BIN)/python -m kernels.cpu.library

dist: $(INSTALLED) ## Build the wheels, with kernels for all CPUs, into dist/: who installs them needs no compiler
	@$(call INSTALL,ziglang)
	@$(BIN)/python .ci/build_wheels.py dist $(ARGS)

docs: $(INSTALLED) ## Build the manual: build/manual/index.html
	@$(call INSTALL,--no-build-isolation --editable '.[docs]')
	@# Not --quiet: then warnings are no errors. The variable turns off an announcement of the theme.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

sbom: $(INSTALLED) ## List what the installed server consists of, as CycloneDX JSON: build/sbom.json
	@$(call INSTALL,cyclonedx-bom)
	@$(BIN)/python .ci/sbom.py build/sbom.json

serve: $(SERVING) kernels ## Serve the shipped model on 127.0.0.1:50051 (ARGS="--model DIR --workers 2 ...")
	@exec $(BIN)/quire serve $(ARGS)

# As on several hosts, but over loopback: each worker has half of the cores.
cluster: $(SERVING) kernels ## Serve with two workers as if they were on other hosts (docs/hosts.md)
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

# In an environment of its own, with the Triton that this torch needs. Compiled kernels, records of what Triton compiles and
# mutations of kernels are not of a torch.
TORCH ?= 2.11.0
TORCH_TESTS := tests/kernels tests/workers tests/gpu $(patsubst %,tests/e2e/test_%.py,parity_machine families library_backend \
  same_bits hidden_states tensor_parallel) --ignore=tests/kernels/cuda/test_compile_gate.py \
  --ignore=tests/kernels/cuda/test_mutations.py
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

bench: $(BENCH_INSTALLED) ## Measure against transformers and llama.cpp, 15 minutes (ARGS="--rows decode-32 --minutes 5")
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

check: check-code check-types check-protos check-imports ## Check style, types, protos and import rules; changes nothing

check-code: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: setup
	$(BIN)/mypy

check-protos: setup
	$(BIN)/python protos/generate.py --check
	$(BIN)/python clients/python/generate_blocking.py --check
	$(BIN)/python protos/generate.py --image $(PROTO_IMAGE)
	$(BIN)/buf lint $(PROTO_IMAGE) --config protos/buf.yaml
	$(BIN)/buf format protos --diff --exit-code
	! test -f protos/released.binpb || $(BIN)/buf breaking $(PROTO_IMAGE) --against protos/released.binpb --config protos/buf.yaml

check-imports: setup
	$(BIN)/python -m pytest -q tests/test_architecture.py

fmt: setup ## Format the code and the protos
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/buf format protos --write

stubs: setup ## Generate the Python stubs from protos/, the blocking client, and pages of the manual
	$(BIN)/python protos/generate.py
	$(BIN)/python clients/python/generate_blocking.py
	PYTHONPATH=. $(BIN)/python .ci/settings_page.py docs/settings.md
	$(BIN)/python .ci/python_page.py docs/python.md

proto-image: setup ## Record the protos of a release, with which check-protos compares later ones; for releases only
	$(BIN)/python protos/generate.py --image protos/released.binpb --without-comments

clean: ## Remove build outputs and caches; keeps .venv
	rm -rf build dist kernels/cpu/build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info clients/python/*.egg-info \
	  clients/python/build
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
