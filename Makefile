# make example    read text that a real model wrote, with or without a GPU
# make test       the tests that guard a change; PYTEST_ARGS="-k gguf" narrows them
# make test-rest  what `make test` leaves out: compiled kernels, emulated PTX, long simulations, the code of the docs
# make test-all   every test that needs no GPU: both of these
# make test-gpu   every test that runs on a GPU, in a process a core, then one summary; PYTEST_ARGS="--seconds 500"
# make check      format, lint, types, the length of pages and sentences, links
# make docs       the documentation as a site in build/docs, which opens from the disk
# make wheel      a wheel with compiled C++ kernels, for this machine's kind; CXX=aarch64-linux-gnu-g++ for arm64
# make pictures   the pictures of the documentation, from results/
# make clean      remove the environment and what was built
#
# Needed: Python >= 3.10 with pip, and make. All targets share one environment, $(VENV).

PYTHON ?= python3
VENV ?= .venv
# Arguments of example.py, such as ARGS="--prompt 'Tell me a joke.'"
ARGS ?=
# The torch to install, as pip writes it: TORCH="torch==2.12.1". Unset: pip's choice, or without a GPU a CPU build,
# which is a tenth of the size, where the package index offers one.
TORCH ?=
CPU_TORCH := torch==2.13.0+cpu

HAS_GPU := $(shell command -v nvidia-smi 2>/dev/null)
WANT_CPU_TORCH := $(if $(TORCH)$(HAS_GPU)$(filter Darwin,$(shell uname)),,yes)

# Two processes with a thread each; a test file stays in one of them, since its fixtures are costly. Hypothesis makes the
# same examples in each run, however slowly; pytest alone makes others each time.
PYTEST_ARGS ?=
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-profile=ci
test test-rest test-all: export OMP_NUM_THREADS := 1
test test-rest test-all: export CUDA_VISIBLE_DEVICES :=
# Python keeps compiled modules. Where the environment forbids that, each process of a test compiles them anew: to
# collect the tests took 30 s instead of 12 in each process (AMD Zen 5, Python 3.11).
test test-rest test-all test-gpu: export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# On a terminal pip shows what it downloads, with its progress; in a log it is quiet, but for warnings: so a line says
# before how long it takes. Modules are compiled when they are first imported.
PIP := PIP_NO_COMPILE=1 $(BIN)/python -m pip --disable-pip-version-check $(shell test -t 2 || echo --quiet)

.PHONY: example model test test-rest test-all test-gpu check docs wheel pictures clean

example: $(VENV)/.installed-demo
	$(BIN)/python example.py $(ARGS)

# Fetched before the tests, so that the test processes do not all fetch it.
model: $(VENV)/.installed-demo,test
	$(BIN)/python -c "from nanovllm.weights.demo_model import demo_model_path; print('default model:', demo_model_path())"

test: model
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(PYTEST_ARGS)

# What `make test` leaves out. Tests marked `alone` measure times, so they come afterwards, one at a time. 5: there are
# none in what PYTEST_ARGS names.
test-rest: model
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not gpu and not alone" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "slow and alone and not gpu" $(PYTEST_ARGS) || test $$? = 5

test-all: model
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not alone" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "alone and not gpu" $(PYTEST_ARGS) || test $$? = 5

test-gpu: model
	$(BIN)/python -m tests.gpu_run $(PYTEST_ARGS)

check: $(VENV)/.installed-demo,test,check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/check.py
	$(BIN)/mypy

docs: $(VENV)/.installed-demo,docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open build/docs/index.html"

# build/lib would add files to the wheel that were deleted since.
wheel: $(VENV)/.installed-demo
	rm -rf build/lib dist/nanovllm-*-none-any.whl
	$(PIP) wheel --no-deps --wheel-dir dist .
	$(BIN)/python -m nanovllm.kernels.cpu.wheel dist/nanovllm-*-none-any.whl

pictures: $(VENV)/.installed-demo,docs
	$(BIN)/python docs/pictures/draw.py

# The stamp's name ends in the extras that it stands for.
$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("nanovllm needs Python >= 3.10, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/pip || { echo "Making the environment $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
ifdef WANT_CPU_TORCH
	@echo "Installing PyTorch into $(VENV): some 200 MB to download, a minute or more ..."
	@$(PIP) install "$(CPU_TORCH)" 2>/dev/null || echo "No CPU build of torch is offered here; pip takes the default one."
endif
	@$(if $(TORCH),$(PIP) install "$(TORCH)")
	@echo "Installing nanovllm[$*] and the packages that it needs: again a minute or so; $(VENV) then takes 2 GB or more ..."
	@$(PIP) install --editable ".[$*]"
	@touch "$@"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
