# Every target runs in .venv, which is made at first use and brought up to date when the pins or
# pyproject.toml change. Needs Python 3.10 or newer with its venv module, git and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
RUN_PINS := requirements/runtime.txt requirements/plot.txt requirements/tensorplay.txt requirements/build.txt
DEV_PINS := requirements/dev.txt

.DEFAULT_GOAL := help
.PHONY: help demo demo-tensorplay test check bench bench-network experiments clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s  %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.run ## train a small model three ways and compare them (ARGS="--help" for its options)
	@$(BIN)/averagers demo $(ARGS)

demo-tensorplay: $(VENV)/.run ## train a small model with TensorPlay on 4 processes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tensorplay.distributed.run --nproc-per-node 4 -- examples/train_tensorplay.py $(ARGS)

test: $(VENV)/.dev ## run all tests, with coverage over every process
	@OMP_NUM_THREADS=1 COVERAGE_FILE="$(CURDIR)/.coverage" $(BIN)/python -m pytest -q --cov --cov-report=term

check: $(VENV)/.dev ## check format, lint, types and the direction of imports
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(VENV)/.run ## measure a round against torch's and TensorPlay's (needs a quiet machine)
	@$(BIN)/python benchmarks/rounds.py $(ARGS)

bench-network: $(VENV)/.run ## measure rounds and training over slow links between network namespaces (needs root, iproute2)
	@$(BIN)/python benchmarks/network.py $(ARGS)
	@$(BIN)/python benchmarks/network.py --overlap
	@$(BIN)/python benchmarks/network.py --training

experiments: $(VENV)/.run ## measure what the methods are worth, each claim by a script (20 to 30 minutes)
	@failed=; for script in post_local quadratic_rule hierarchy error_feedback diloco streaming; do \
		OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quality/$$script.py || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "claims that do not hold:$$failed"; exit 1; }

clean: ## remove .venv and all that the other targets wrote, but no benchmark results
	@rm -rf $(VENV) .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -rf averagers-demo build dist
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# All pins are resolved in one go, so nothing can bring another torch; the package itself comes after, without
# dependencies of its own.
$(VENV)/.run: $(RUN_PINS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("averagers needs Python 3.10 or newer, and $(PYTHON) is %d.%d: say make PYTHON=..." % sys.version_info[:2])'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (the first time downloads torch)"
	@$(PIP) install $(RUN_PINS:%=-r %)
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run $(DEV_PINS)
	@$(PIP) install -r $(DEV_PINS)
	@touch $@
