# Needs Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
# Installed first and by itself, so that nothing else picks a build of torch. Where
# the default index has only CUDA builds, point TORCH_ARGS at an index of CPU builds.
TORCH ?= torch==2.13.0
TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: help demo test check format bench clean

help:
	@echo "make demo    roll out, check and time shoal beside its peers (two minutes)"
	@echo "make test    run all tests; ARGS='-k name' picks some"
	@echo "make check   lint, formatting, types and the import rules"
	@echo "make format  format and fix what ruff can"
	@echo "make bench   run all benchmarks; ARGS=--quick for a short run"
	@echo "make clean   remove caches, build output and the virtual environment"

# One environment for everything: the demo compares with the same peers as the
# benchmarks do.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "shoal needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV): $(STAMP)

demo: $(STAMP)
	$(BIN)/shoal demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
