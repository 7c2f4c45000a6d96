# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
VENV := .venv/bin
SUITE ?= ttft
ARGS ?=
N ?= 50
VLLM ?= 0.33.0
NEXT ?= tests/compat tests/stateful tests/cache tests/tier tests/store tests/serve tests/test_scheduler.py tests/e2e

.DEFAULT_GOAL := help
.PHONY: help setup quick test everything next sampled stress demo bench docs lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make the environment: .venv in the repository root (quick when it is up to date)
	@scripts/setup_env.sh "$(PYTHON)"

quick: setup ## run every test that needs no engine and is not slow, in some minutes: at every save
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE= $(VENV)/python -m pytest -m "not e2e" --ignore=tests/e2e \
		-n logical --maxprocesses 4 --dist worksteal --hypothesis-profile quick -q $(ARGS)

test: setup ## run all tests; ARGS="tests/cache -k name" runs some of them
	@PYTHONDONTWRITEBYTECODE= $(VENV)/python -m pytest $(ARGS)

everything: ## what CI runs, with all that is slow: before an issue is closed, and before a release
	@.ci/run everything

next: setup ## run the suites on the vLLM to come, over the installed one's kernels; NEXT="tests/e2e/test_pool.py" some of them
	@folder=$$($(VENV)/python scripts/next_vllm.py $(VLLM)) && \
		PYTHONDONTWRITEBYTECODE= PYTHONPATH=$$folder VLLM_TARGET_DEVICE=cpu $(VENV)/python -m pytest $(NEXT) $(ARGS)

sampled: setup ## mistakes drawn at random from the whole package, and which of them the tests notice: make sampled N=50
	@nice $(VENV)/python scripts/mutants.py $(N) $(ARGS)

stress: setup ## the models of tests/stateful at length: make stress ARGS="--operations 1000000 --seeds 10000"
	@nice $(VENV)/python -m tests.stateful.stress $(ARGS)

demo: setup ## show reuse on a small model and real text; ARGS="--model DIR" shows answers of a real one
	@$(VENV)/python -m bench.demo $(ARGS)

bench: setup ## run a benchmark: make bench SUITE=ttft ARGS="--quick --json out.json"
	@$(VENV)/python -m bench $(SUITE) $(ARGS)

docs: .venv-docs/ready ## build the documentation into build/docs; broken links are errors
	@.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo "docs: open build/docs/index.html"

.venv-docs/ready: requirements/docs.txt
	@echo "docs: installing what the site needs into .venv-docs (seconds, the first time only)"
	@"$(PYTHON)" -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install -qq --no-input --disable-pip-version-check --no-deps -r $<
	@touch $@

lint: setup ## ruff (lint and format), mypy, SPDX headers
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@git ls-files "*.py" "*.sh" "*.yaml" Makefile .ci/run | xargs $(VENV)/python scripts/check_spdx.py

format: setup ## let ruff rewrite the sources
	@$(VENV)/ruff check --fix .
	@$(VENV)/ruff format .

clean: ## remove build output and caches (not .venv*, not the model cache)
	@rm -rf build dist docs/_generated *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs rm -rf
