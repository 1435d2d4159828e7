# Each target sets up what it needs: .venv, packages, the embedded model. A second run takes seconds.
#
#   make demo       answer a prompt, and show that it equals plain decoding
#   make test       all tests that need no GPU
#   make check      lint, types, layers
#   make evidence   the long stream comparison on the embedded model (resumable; hours on a CPU)
#   make bench-gpu  all figures of a GPU, and which goals they meet (in gpu-results; half an hour)
#   make format     let ruff rewrite the sources
#   make map        write the README's file map anew
#   make metrics    lengths, parameters, comments: the figures that CONTRIBUTING.md aims at
#   make clean      remove .venv and what the tools left behind; the fetched model stays
#
# PYTHON       the interpreter that .venv is made with (3.11 or newer)
# CONSTRAINTS  the versions to install
# PYTEST_ARGS  more words for pytest; `-n 0` runs the tests in one process, one after the other
# TORCH_INDEX  an extra package index to find torch in; see "Installing" in README.md

PYTHON      ?= python3
CONSTRAINTS ?= constraints/cpu.txt
TORCH_INDEX ?=
MODEL       ?= smollm2-135m
PROMPT      ?= Proofread this text and return it: The lighthouse keeper climbed the stairs every evening. \
He lit the lamp and cleaned the glass. Then he watched the ships go by until the morning. When the \
sun rose, he climbed down the stairs and made himself a cup of tea.
EVIDENCE    ?= -m furcate.prove.evidence
PYTEST_ARGS ?=
BENCH_ARGS  ?=

BIN     := .venv/bin
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
           $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c $(CONSTRAINTS)
BASE    := .venv/.furcate-base
DEV     := .venv/.furcate-dev

.DEFAULT_GOAL := help
.PHONY: help demo test gpu check evidence bench-gpu format map metrics model clean

help:
	@sed -n 's/^# \{0,1\}//; 1,/^$$/p' Makefile

demo: $(BASE) model
	@$(BIN)/furcate generate --compare --target $(MODEL) --drafter hybrid --temperature 0 --max-tokens 160 "$(PROMPT)"

test: $(DEV) model
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

gpu: $(DEV) model
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports

evidence: $(DEV) model
	$(BIN)/python $(EVIDENCE)

bench-gpu: $(DEV) model
	$(BIN)/python benchmarks/all_gpu.py $(BENCH_ARGS)

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

map: $(BASE)
	$(BIN)/python tools/readme_map.py --write

metrics: $(BASE)
	$(BIN)/python tools/metrics.py

model: $(BASE)
	@$(BIN)/furcate models fetch $(MODEL)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find furcate tests tools -name __pycache__ -type d -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "furcate needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

$(BASE): pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@echo "installing furcate into .venv (the first time this takes minutes) ..."
	$(PIP) -e .
	@touch $@

$(DEV): $(BASE)
	$(PIP) -e '.[dev]'
	@touch $@
