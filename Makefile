# Each environment is made once, and again when what it is made from changes: the files `pinned` and
# `project` inside it are the stamps. Any Python from 3.11 on will do: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
FUZZ   := .venv-fuzz
DOCS   := .venv-docs

# torch goes in first, alone and by this exact name: an index that serves several builds of one version (CPU,
# CUDA) then decides which one fits the machine, and nothing that is installed later moves it.
TORCH := torch==2.13.0
OLDEST_TORCH := torch==2.11.0

# Tests spawn several processes; one thread for each keeps them from fighting over the cores.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

# A test that hangs in Python fails after pytest-timeout's limit (pyproject.toml). One that hangs in C cannot
# be interrupted: after this many seconds every thread's traceback is printed and the run ends.
HARD_LIMIT := -o faulthandler_timeout=240 -o faulthandler_exit_on_timeout=true
FAST := -m "not slow and not torture and not gpu" $(HARD_LIMIT)

# What takes more than some seconds each: all combinations, kills at random moments, a thousand ranks.
SLOW := -m "slow and not torture and not gpu and not sweep" $(HARD_LIMIT)

# Ranks wait for each other more than they compute, so two test files at a time take half as long on two cores.
# Files are dealt in the order of tests/conftest.py, those that spawn ranks first.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=1

# More arguments for pytest or the sweep: make test ARGS="-k tied -x"
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow check format docs sweep torture test-oldest test-newest newest test-gpu fuzz dist bench-load bench-save bench-checkpoint bench-merge bench-train bench-tenants bench-quantized bench-four-bits bench-trainer bench-startup gpu-hour clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/project ## shardwise on a small model, on this machine, in a minute
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/project ## everything a machine without a GPU can prove
	$(VENV)/bin/python -m pytest $(FAST) $(PARALLEL) $(ARGS)

test-slow: $(VENV)/project ## what takes longer: every combination, kills, a thousand ranks; half an hour
	$(VENV)/bin/python -m pytest $(SLOW) $(PARALLEL) $(ARGS)

check: $(VENV)/project ## format, lint, types and imports; takes seconds
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/mypy --no-error-summary
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/project ## rewrite the sources as `make check` wants them
	$(VENV)/bin/ruff check --quiet --fix-only .
	$(VENV)/bin/ruff format .

docs: $(DOCS)/pinned ## the pages as a site, in build/site; a link or an anchor that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

sweep: $(VENV)/project ## every architecture, every world size, bitwise; takes long
	HYPOTHESIS_PROFILE=thorough PYTHONPATH=. $(VENV)/bin/python tests/sweep.py $(ARGS)

torture: $(VENV)/project ## saves killed and crashed at every moment, two at once; many minutes
	$(VENV)/bin/python -m pytest -m torture -n $(WORKERS) -rP $(ARGS)

test-oldest: $(OLDEST)/project ## `make test` on the oldest versions that are supported
	$(OLDEST)/bin/python -m pytest $(FAST) $(PARALLEL) $(ARGS)

test-newest: newest ## the same on the newest versions that are released, whatever they are
	$(NEWEST)/bin/python -m pytest $(FAST) $(PARALLEL) $(ARGS)

test-gpu: $(VENV)/project ## what only a GPU can prove
	$(VENV)/bin/python -m pytest -m gpu $(ARGS)

fuzz: $(FUZZ)/made ## hostile files of four formats, guided by coverage; ARGS="--seconds 600 --only archive"
	PYTHONPATH=src:. $(FUZZ)/bin/python -m tests.fuzz.run $(ARGS)

dist: $(VENV)/project ## the wheel and the source distribution, looked into and installed, in dist/
	rm -rf dist build src/*.egg-info
	$(VENV)/bin/python -m tests.distribution dist

bench-load: $(VENV)/project ## loading against peers and the roof; half an hour, ARGS=--quick for minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.load $(ARGS)

bench-save: $(VENV)/project ## saving against transformers, torch and the roof; ten minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.save $(ARGS)

bench-checkpoint: $(VENV)/project ## checkpoints against torch's own and the bare copy; minutes, ARGS="--what lora"
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.checkpoint $(ARGS)

bench-merge: $(VENV)/project ## merging against accelerate; minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.merge $(ARGS)

bench-train: $(VENV)/project ## a step against FSDP2 by hand, memory, time to the first step; ARGS=--quick for a minute
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.train $(ARGS)

bench-tenants: $(VENV)/project ## many LoRAs in one bank against switching, and against one after the other; ARGS=--quick for a minute
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.tenants $(ARGS)

bench-quantized: $(VENV)/project ## a quantized checkpoint against the same in bfloat16; minutes, ARGS=--quick
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.quantized $(ARGS)

bench-four-bits: $(VENV)/project ## a base in four bits: brought up, its memory, a step of a LoRA on it; minutes, ARGS=--quick
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.four_bit_base $(ARGS)

bench-trainer: $(VENV)/project ## a step of the Hugging Face Trainer against a loop by hand; minutes, ARGS=--quick
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.trainer $(ARGS)

bench-startup: $(VENV)/project ## memory and seconds of a model coming up, against peers, with a picture; minutes, ARGS=--quick
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.startup $(ARGS)

gpu-hour: $(VENV)/project ## all that only a GPU can show, in at most an hour; ARGS="--device cpu --tiny" to see that it runs
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.gpu_hour $(ARGS)

clean: ## remove the environments and everything that was made in them
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(FUZZ) $(DOCS) fuzz-found build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call environment,FOLDER,REQUIREMENTS,TORCH): a folder that is there already is kept and brought to the pins,
# unless it is broken or belongs to another Python.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11 or missing; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making $(1) from $(2)"
	@version='import sys; print(sys.version_info[:2])'; \
	if [ "$$($(1)/bin/python -c "$$version" 2>&1)" = "$$($(PYTHON) -c "$$version")" ]; \
		then $(PYTHON) -m venv $(1); else $(PYTHON) -m venv --clear $(1); fi
	@$(1)/bin/python -m pip install $(QUIET) --constraint $(2) $(3)
	@$(1)/bin/python -m pip install $(QUIET) --no-deps --requirement $(2)
	@touch $@
endef

define project
	@$(@D)/bin/python -m pip install $(QUIET) --no-deps --no-build-isolation --editable .
	@$(@D)/bin/python -m pip check
	@touch $@
endef

QUIET := -qq

$(VENV)/pinned: requirements/pinned.txt
	$(call environment,$(VENV),$<,$(TORCH))

$(OLDEST)/pinned: requirements/oldest.txt
	$(call environment,$(OLDEST),$<,$(OLDEST_TORCH))

# Not with --quiet, which counts no warnings, so that nothing would be an error.
# Neither torch nor this package: names and docstrings are read from the sources.
$(DOCS)/pinned: requirements/docs.txt
	$(call environment,$(DOCS),$<,mkdocs)

# What is newest changes though no file here does, so this is made anew every time; where nothing is newer, quickly.
# torch first and alone, as above, and nothing later moves it.
newest:
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install $(QUIET) --upgrade torch setuptools
	@$(NEWEST)/bin/python -m pip install $(QUIET) --upgrade --upgrade-strategy eager --no-build-isolation \
		--editable ".[dev]"
	@$(NEWEST)/bin/python -m pip check
	@$(NEWEST)/bin/python -m pip list --format freeze \
		| grep -iE '^(torch|transformers|accelerate|peft|safetensors|huggingface_hub)=='

# The formats are read without torch, or anything else: a fuzzer needs nothing but itself.
$(FUZZ)/made:
	@$(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/python -m pip install $(QUIET) "atheris>=3"
	@touch $@

# Packages that others import as soon as they are there, which costs each process of the tests a second. They lie
# apart, and a test that wants them says so (tests/peers.py).
$(VENV)/peers/made $(OLDEST)/peers/made: %/peers/made: %/pinned requirements/peers.txt
	@rm -rf $(@D)
	@for package in $$(grep -v '^#' requirements/peers.txt); do \
		$*/bin/python -m pip install $(QUIET) --no-deps --target $(@D)/$${package%%=*} $$package || exit 1; done
	@touch $@

$(VENV)/project $(OLDEST)/project: %/project: %/pinned %/peers/made pyproject.toml
	$(project)
