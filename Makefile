# Two commands: `make demo` shows the product on real models, `make test` proves it. Both prepare .venv first.
PYTHON ?= python3.11
BIN := .venv/bin
PIP_AUDIT ?= pip-audit

.DEFAULT_GOAL := help
.PHONY: help setup programs demo test bench docs audit lint format api-compat clean

help:
	@echo "make demo     two vLLM workers, a verl trainer and the coordinator, on this machine's CPU"
	@echo "make test     lint, types, import contracts, then every test"
	@echo "make bench    rollouts in and out of the coordinator, beside the same statements without HTTP"
	@echo "make docs     the documentation as a site, in site/"
	@echo "make audit    known vulnerabilities of what the lock files pin, by pip-audit"
	@echo "make setup    the environment in .venv (demo and test do this themselves)"
	@echo "make lint     ruff, mypy and import-linter alone"
	@echo "make format   let ruff format and fix the code"
	@echo "make api-compat BASE=main   what the API's changes since that commit mean for its clients"
	@echo "make clean    remove .venv, caches and build output"
	@echo ""
	@echo "make demo KEEP=1 leaves the coordinator running afterwards; PYTHON=... names another Python 3.11"

setup:
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) was not found: install Python 3.11, or name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) requirements/install.py

programs: setup
	@$(PYTHON) requirements/programs.py

demo: setup
	@$(BIN)/coordinator demo $(if $(filter-out 0,$(KEEP)),--keep)

test: programs lint
	@$(BIN)/python -m pytest --numprocesses=3 --dist=loadgroup tests

bench: setup
	@$(BIN)/python -m benchmarks.ledger

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean
	@echo "site/index.html"

audit:
	@command -v $(PIP_AUDIT) >/dev/null || { echo "audit: $(PIP_AUDIT) was not found: pipx install pip-audit, on a machine that reaches pypi.org" >&2; exit 1; }
	@for lock in server cpu; do \
		$(PIP_AUDIT) --requirement requirements/$$lock.lock --no-deps --disable-pip --progress-spinner off || exit 1; \
	done

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

BASE ?= HEAD
api-compat: setup
	@git show $(BASE):docs/openapi.json | $(BIN)/python -m coordinator.openapi.compatibility /dev/stdin docs/openapi.json

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
