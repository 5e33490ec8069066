# Each target does its own set-up in .venv first (tools/setup.sh); a second run finds it done.
#   make quickstart   trains SmolLM2-135M-Instruct on sums; QUICKSTART_ARGS="trainer.seed=1" passes overrides
#   make test         ruff and the default tests          make test-all   every test that runs on a CPU
#   make lint         ruff, formatting and pyright        make bench      microbenchmarks (on a GPU)
# STACK=cpu or STACK=cuda overrules what is found; PYTHON=/path/to/python names the interpreter.

STACK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
READY := .venv/.ready-$(STACK)
SMOLLM2 := .cache/smollm2-135m-instruct
export MAKECMDGOALS PYTHON

.PHONY: help venv quickstart test test-all lint bench clean

help:
	@sed -n 's/^#  *//p' Makefile

venv: $(READY)

$(READY): pyproject.toml tools/setup.sh
	@tools/setup.sh $(STACK)

$(SMOLLM2): | $(READY)
	@.venv/bin/python tools/get_smollm2.py $@

quickstart: $(READY) $(SMOLLM2)
	.venv/bin/torchrun -m fastgrpo.train +exp=quickstart model.path=$(SMOLLM2) $(QUICKSTART_ARGS)

test: $(READY)
	.venv/bin/ruff check
	.venv/bin/python -m pytest -q $(PYTEST_ARGS)

test-all: $(READY)
	.venv/bin/ruff check
	.venv/bin/python -m pytest -q -m "not gpu" $(PYTEST_ARGS)

lint: $(READY)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath .venv/bin/python

bench: $(READY)
ifeq ($(STACK),cuda)
	@set -e; for name in lm_head attention; do .venv/bin/python bench/bench_$$name.py; done
else
	@echo "make bench measures GPU kernels and finds no GPU here; committed results are in bench/results/."
endif

clean:
	rm -rf .venv .cache dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
