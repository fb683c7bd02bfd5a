# Needs python3 (3.11 or newer) and make, nothing else. To use another Python: make test PYTHON=python3.12
PYTHON := python3
ARGS :=
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## see coupled chains at work
	@$(BIN)/hookean demo $(ARGS)

test: $(READY) ## run the tests; some of them: make test ARGS="-k foo"
	$(BIN)/python -m pytest -n auto $(ARGS)

bench: $(READY) ## measure what asynchrony and the store cost; wants an idle machine
	$(BIN)/python benchmarks/asynchrony.py

lint: $(READY) ## check style with ruff
	$(BIN)/ruff check $(ARGS) .
	$(BIN)/ruff format --check .

types: $(READY) ## check types with mypy
	$(BIN)/mypy $(ARGS)

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "hookean needs Python 3.11 or newer, and '$(PYTHON)' was not found." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hookean needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "If a newer one is installed, name it, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up .venv with hookean and what it needs (only now; takes about a minute) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@
