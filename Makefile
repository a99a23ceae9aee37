# Each environment is created once, and again when its requirements change. The files `pinned` and `project` inside it
# are the stamps. Any Python from 3.11 on works: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
FUZZ   := .venv-fuzz
DOCS   := .venv-docs

# torch is installed first, alone and in this exact version, so that the index chooses the build for the machine
# (CPU, CUDA) and later packages do not change it.
TORCH := torch==2.13.0
OLDEST_TORCH := torch==2.11.0

# Tests spawn several processes, with one thread each.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

# A test that hangs in Python fails after the limit of pytest-timeout (pyproject.toml, or its mark). One that hangs in C
# cannot be interrupted, so after this many seconds, more than any of these limits, all tracebacks are printed and the
# run ends.
HARD_LIMIT := -o faulthandler_timeout=4000 -o faulthandler_exit_on_timeout=true
FAST := -m "not slow and not torture and not gpu" $(HARD_LIMIT)

# Tests of more than some seconds each: all combinations, random kills, a thousand ranks.
SLOW := -m "slow and not torture and not gpu and not sweep" $(HARD_LIMIT)

# Ranks mostly wait for each other, so two test files at a time halve the time on two cores. tests/conftest.py orders
# the files: those that spawn ranks first.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=1

# For a machine with a GPU that has torch and transformers, which are not installed again.
GPU_PYTHON ?= 3.12
GPU_PACKAGES := bitsandbytes|hypothesis|iniconfig|peft|pluggy|pytest|pytest-timeout|sortedcontainers

# Further arguments for pytest, the sweep or a benchmark: make test ARGS="-k tied -x"
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-real test test-slow check format docs sweep torture test-oldest test-newest newest test-gpu fuzz dist bench-load bench-save bench-checkpoint bench-merge bench-train bench-bank bench-serve bench-quantized bench-startup gpu wheels-for-gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/project ## fine-tune a small model, kill it, resume it; one minute
	$(VENV)/bin/python examples/demo.py

demo-real: $(VENV)/project $(VENV)/real/made ## fine-tune SmolLM2-135M, kill it, resume it; minutes
	PYTHONPATH=$(VENV)/real $(VENV)/bin/python examples/demo_real.py $(ARGS)

# Budgets are processor time, user and system, as `time make test` shows it.
test: $(VENV)/project ## run the fast tests that need no GPU; budget: 7 minutes of processor time
	$(VENV)/bin/python -m pytest $(FAST) $(PARALLEL) $(ARGS)

test-slow: $(VENV)/project ## run the slow tests: all combinations, kills, a thousand ranks; budget: 30 minutes
	$(VENV)/bin/python -m pytest $(SLOW) $(PARALLEL) $(ARGS)

check: $(VENV)/project ## check format, lint, types and imports; a minute
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/mypy --no-error-summary
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/project ## format the sources
	$(VENV)/bin/ruff check --quiet --fix-only .
	$(VENV)/bin/ruff format .

docs: $(DOCS)/pinned ## build the site in build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

sweep: $(VENV)/project ## compare all architectures and world sizes bitwise; long
	HYPOTHESIS_PROFILE=thorough PYTHONPATH=. $(VENV)/bin/python tests/sweep.py $(ARGS)

torture: $(VENV)/project ## kill and crash saves at every moment; hours, TORTURE_MOMENTS=24 for an hour
	$(VENV)/bin/python -m pytest -m torture -n $(WORKERS) -rP $(ARGS)

test-oldest: $(OLDEST)/project ## run `make test` on the oldest supported versions
	$(OLDEST)/bin/python -m pytest $(FAST) $(PARALLEL) $(ARGS)

test-newest: newest ## run `make test` on the newest released versions
	$(NEWEST)/bin/python -m pytest $(FAST) $(PARALLEL) $(ARGS)

test-gpu: $(VENV)/project ## run the tests that need a GPU
	$(VENV)/bin/python -m pytest -m gpu $(ARGS)

fuzz: $(FUZZ)/made ## fuzz the readers of four formats, guided by coverage; ARGS="--seconds 600 --only archive"
	PYTHONPATH=src:. $(FUZZ)/bin/python -m tests.fuzz.run $(ARGS)

dist: $(VENV)/project ## build, inspect and install the wheel and the source distribution, in dist/
	rm -rf dist build src/*.egg-info
	$(VENV)/bin/python -m tests.distribution dist

# Each runs in a minute with ARGS=--tiny, on shapes that mean nothing.
bench-load: $(VENV)/project ## compare loading with peers and the raw read; half an hour
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.load $(ARGS)

bench-save: $(VENV)/project ## compare saving with transformers, torch and the raw write; ten minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.save $(ARGS)

bench-checkpoint: $(VENV)/project ## compare checkpoints with torch's own and a plain copy; minutes, ARGS="--what lora"
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.checkpoint $(ARGS)

bench-merge: $(VENV)/project ## compare merging with accelerate; minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.merge $(ARGS)

bench-train: $(VENV)/project ## compare steps and starts with FSDP2 by hand, the Trainer, TRL and accelerate; minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.train $(ARGS)

bench-bank: $(VENV)/project ## compare many LoRAs in one bank with switching and with separate runs; 20 minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.bank $(ARGS)
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.bank_requests $(ARGS)

bench-serve: $(VENV)/project ## compare the server with the bank alone, and clients at once with one after the other; 15 minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.serve $(ARGS)

bench-quantized: $(VENV)/project ## compare FP8 and 4 bits with bfloat16 and with peers; minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.quantized $(ARGS)

bench-startup: $(VENV)/project ## compare memory and time of ways to load, with a picture; minutes
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.startup $(ARGS)

gpu: $(VENV)/project ## measure what needs a GPU, in 12 minutes; ARGS="--device cpu --tiny" tries it without
	PYTHONPATH=. $(VENV)/bin/python -m benchmarks.gpu $(ARGS)

# With what is tracked, little enough for a machine that takes 64 MiB.
wheels-for-gpu: ## collect what `make gpu` needs beside torch and transformers on a machine without network, in build/gpu
	rm -rf build/gpu
	$(PYTHON) -m pip download $(QUIET) --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--implementation cp $(foreach libc,17 24 28,--platform manylinux_2_$(libc)_x86_64) --dest build/gpu \
		$$(grep -hE '^($(GPU_PACKAGES))==' requirements/oldest.txt requirements/peers.txt)
	git rev-parse --short=12 HEAD > build/gpu/commit
	@mib=$$(du -cm --apparent-size build/gpu $$(git ls-files) | tail -n 1 | cut -f 1); \
		echo "$$mib MiB with the repository"; test $$mib -le 64

clean: ## remove the environments and all build products
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(FUZZ) $(DOCS) fuzz-found build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call environment,FOLDER,REQUIREMENTS,TORCH): an existing folder is updated to the pins, unless it is broken or
# belongs to another Python.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11 or missing; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "creating $(1) from $(2)"
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

# Without --quiet, which hides the warnings that have to be errors. Needs neither torch nor this package, because names
# and docstrings are read from the sources.
$(DOCS)/pinned: requirements/docs.txt
	$(call environment,$(DOCS),$<,mkdocs)

# Updated on every call, because new releases change no file here. torch first and alone, as above.
newest:
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install $(QUIET) --upgrade torch setuptools
	@$(NEWEST)/bin/python -m pip install $(QUIET) --upgrade --upgrade-strategy eager --no-build-isolation \
		--editable ".[dev]"
	@$(NEWEST)/bin/python -m pip check
	@$(NEWEST)/bin/python -m pip list --format freeze \
		| grep -iE '^(torch|transformers|accelerate|peft|safetensors|huggingface_hub|tinker)=='

# The readers of formats need no other package.
$(FUZZ)/made:
	@$(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/python -m pip install $(QUIET) "atheris>=3"
	@touch $@

# Packages that others import if they are installed, which costs each test process a second. They are installed apart,
# and tests that need them add them to their path (tests/peers.py).
$(VENV)/peers/made $(OLDEST)/peers/made: %/peers/made: %/pinned requirements/peers.txt
	@rm -rf $(@D)
	@for package in $$(grep -v '^#' requirements/peers.txt); do \
		$*/bin/python -m pip install $(QUIET) --no-deps --target $(@D)/$${package%%=*} $$package || exit 1; done
	@touch $@

$(VENV)/real/made: $(VENV)/pinned requirements/real.txt
	@rm -rf $(@D)
	@$(VENV)/bin/python -m pip install $(QUIET) --no-deps --target $(@D) --requirement requirements/real.txt
	@touch $@

$(VENV)/project $(OLDEST)/project: %/project: %/pinned %/peers/made pyproject.toml
	$(project)
