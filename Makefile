# Every target works from a bare Python 3.11 or newer; `make setup` comes by itself.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all verify power bench bench-history dashboard torchtitan torchtitan-setup check docs smoke-install dist \
    newcomer gpu clean

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
DIST := .venv-dist

# The meta package last: the six that it requires come before it, in the same pip call.
PACKAGES := trace dtensor testkit rng plans pipeline checkpoint vescale
EXTRAS_vescale := [demo]
BUILD_TOOLS := build editables hatchling
TOOLS := accelerate asv expecttest furo hypothesis ipykernel mypy myst-parser nbclient numpy nvidia-ml-py peft pytest \
    pytest-benchmark rich ruff safetensors sphinx

STAMP := $(VENV)/.installed
STAMP_INPUTS := Makefile constraints.txt $(wildcard packages/*/pyproject.toml packages/*/src/*/_version.py)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

setup: $(STAMP) ## make .venv with every package editable, and the tools
	@echo "setup: ready, in $(VENV)"

demo: $(STAMP) ## train a GPT and a Llama on one process, then on four, and compare
	@$(RUN) examples/demo.py

test: $(STAMP) ## run the core of the tests: bazel test //..., or the same targets under pytest
	@$(RUN) tools/run_tests.py

test-all: $(STAMP) ## run every test with its grids in full, then verify: hours, goes on where it was
	@$(RUN) tools/run_tests.py --all

verify: $(STAMP) ## run every "What it must show" check in full, and write results/ (ONLY=2.6 for some)
	@$(RUN) tools/verify.py $(ONLY)

power: $(STAMP) ## which mutants each test kills, CPU seconds beside: hours, goes on where it was (AREAS="rules zero" EACH=15 TESTS=packages; CHOOSE=1 chooses the core)
	@PYTHONPATH=tools $(RUN) -m power $(if $(CHOOSE),--choose) $(if $(AREAS),--areas $(AREAS)) $(if $(EACH),--each $(EACH)) $(if $(TESTS),--tests $(TESTS))

bench: $(STAMP) ## print the headline ratios of this commit against their budgets
	@$(RUN) benchmarks/ratios.py --report-only

bench-history: $(STAMP) ## measure the headlines (ALL=1: everything) of the last N commits (N=20) without figures
	@$(RUN) benchmarks/history.py $(or $(N),20) $(if $(ALL),--all)

dashboard: $(STAMP) ## write the benchmark pages, then fail if a headline regressed
	@$(RUN) benchmarks/dashboard.py
	@$(RUN) benchmarks/gate.py

torchtitan-setup: $(STAMP) ## make .venv-torchtitan, for the comparison with TorchTitan
	@$(RUN) benchmarks/torchtitan/side_by_side.py setup

torchtitan: $(STAMP) ## run the same Llama on veScale and TorchTitan, where its environment is
	@$(RUN) benchmarks/torchtitan/side_by_side.py all

check: $(STAMP) ## ruff, the layering of the packages, their changelogs, the types of what is public; the size of the sources
	@$(RUN) -m ruff check .
	@$(RUN) tools/checks/check_layers.py
	@$(RUN) tools/checks/check_changelogs.py
	@$(RUN) tools/checks/check_types.py
	@$(RUN) tools/checks/size.py

docs: $(STAMP) ## build the documentation with a reference of every public name, into build/docs
	@$(RUN) tools/make_docs.py

smoke-install: $(STAMP) ## install each package from the network into an empty environment, and use it
	@$(RUN) tools/fresh_install.py

dist: $(DIST)/.installed ## build a wheel and a source archive of every package, into dist/; needs no torch
	@$(DIST)/bin/python tools/make_dist.py dist

newcomer: $(STAMP) ## from built wheels alone: train, save, go on under another mesh, export, generate
	@$(RUN) tools/newcomer.py

gpu: ## on a machine with a GPU, offline, with its own torch (PYTHON=...): everything that only a GPU can show, in 20 minutes
	@PYTHONPATH=tools$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m gpu $(PARTS)

clean: ## remove .venv; the next target makes it again
	@rm -rf $(VENV) $(DIST)

$(DIST)/.installed: Makefile constraints.txt
	@$(PYTHON) -m venv --clear $(DIST)
	@$(DIST)/bin/python -m pip install -q -c constraints.txt $(BUILD_TOOLS)
	@touch $@

$(STAMP): $(STAMP_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "setup: Python 3.11 or newer is needed, and $(PYTHON) is not; name one: make setup PYTHON=python3.12" >&2; \
	    exit 1; }
	@$(RUN) -c '' 2>/dev/null || { \
	    echo "setup: creating $(VENV)"; \
	    $(PYTHON) -m venv --clear $(VENV); }
	@echo "setup: installing the build tools"
	@$(RUN) -m pip install -q -c constraints.txt $(BUILD_TOOLS)
	@echo "setup: installing torch, the tools and the packages (some minutes the first time)"
	@$(RUN) -m pip install -q -c constraints.txt --no-build-isolation torch $(TOOLS) \
	    $(foreach package,$(PACKAGES),-e ./packages/$(package)$(EXTRAS_$(package)))
	@touch $@
