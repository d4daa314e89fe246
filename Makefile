# `make` lists the targets. The environment is made on first use, and again only when pyproject.toml changes.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train sample see lessons board test soak lint audit bench clean

help:        ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

$(VENV)/.run: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else f"error: Python {v[0]}.{v[1]} is not supported. Use 3.10 to 3.13: make PYTHON=python3.12 ...")'
	@echo 'installing into $(VENV), once ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

train: $(VENV)/.run   ## train the default GPT; more with ARGS="model.num_heads=8"
	@$(BIN)/python train.py $(ARGS)

sample: $(VENV)/.run   ## let the newest run write; more with ARGS='prompt="To be"'
	@$(BIN)/python sample.py $(ARGS)

board: $(VENV)/.run   ## look at all runs in TensorBoard
	@$(BIN)/python -m tensorboard.main --logdir runs --samples_per_plugin images=100

test: $(VENV)/.dev   ## run the test suite
	@$(BIN)/python -m pytest $(ARGS)

soak: $(VENV)/.dev   ## run the long tests: kills at every moment, five thousand steps, more ways to resume
	@$(BIN)/python -m pytest -n 0 -m soak $(ARGS)

lint: $(VENV)/.dev   ## check style, and that imports go down
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

audit: $(VENV)/.run   ## look up what is installed among known vulnerabilities; needs the network
	@test -x $(VENV)/audit/bin/python || $(PYTHON) -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install -q --upgrade pip-audit
	@$(VENV)/audit/bin/python -m pip_audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

see: $(VENV)/.run   ## look at a model's attention; more with ARGS='prompt="Orange is my favorite fruit" png=maps.png'
	@$(BIN)/python -m analysis.inspect_attention $(ARGS)

lessons: $(VENV)/.run   ## how masks work and what attention costs, in tables
	@$(BIN)/python -m analysis.lessons $(ARGS)

bench: $(VENV)/.dev   ## measure speed side by side: training, Lightning, start, drawing, products, attention, context, sampling
	@$(BIN)/python -m benchmarks.training_speed
	@$(BIN)/python -m benchmarks.kernels
	@$(BIN)/python -m benchmarks.lightning_overhead
	@$(BIN)/python -m benchmarks.startup
	@$(BIN)/python -m benchmarks.drawing_cost
	@$(BIN)/python -m benchmarks.linear_speed
	@$(BIN)/python -m benchmarks.attention_speed
	@$(BIN)/python -m benchmarks.context_cost
	@$(BIN)/python -m benchmarks.sampling

clean:        ## remove the environment and the caches; runs stay
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
