# make example   read text that a real model wrote, with or without a GPU
# make test      run the whole test suite; PYTEST_ARGS="-k gguf" narrows it
#
# Needed: Python >= 3.10 with pip, and make. Both targets share one environment, $(VENV).

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

# Without a GPU two processes with a thread each; a test file stays in one of them, since its fixtures are costly.
# With a GPU a single process: two would size their caches for the same memory.
PYTEST_ARGS ?= $(if $(HAS_GPU),,-n 2 --dist loadfile --no-loadscope-reorder)
ifndef HAS_GPU
test: export OMP_NUM_THREADS := 1
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: example test clean

example: $(VENV)/.installed-demo
	$(BIN)/python example.py $(ARGS)

# The model is fetched first, so that the test processes do not all fetch it.
test: $(VENV)/.installed-demo,test
	$(BIN)/python -c "from nanovllm.weights.demo_model import demo_model_path; print('default model:', demo_model_path())"
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The stamp's name ends in the extras that it stands for.
$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("nanovllm needs Python >= 3.10, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
ifdef WANT_CPU_TORCH
	$(PIP) install "$(CPU_TORCH)" 2>/dev/null || echo "No CPU build of torch is offered here; pip takes the default one."
endif
	$(if $(TORCH),$(PIP) install "$(TORCH)")
	$(PIP) install --editable ".[$*]"
	touch "$@"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
