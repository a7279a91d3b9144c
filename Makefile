# `make demo` and `make test` are all a fresh machine with Python 3.11 needs; each sets up .venv by itself.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= demo

export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo test test-slow check bench env clean

demo: env ## a small dataset, features, a changed setting, features again, a picture report
	$(BIN)/scenecache demo --out $(DEMO)

test: env check ## lint, types, import rules and the quick tests (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -q -m "not slow" --durations=15

test-slow: env ## what takes minutes: 100 kills, 64-sample renders
	$(BIN)/python -m pytest -q -m slow --timeout 1800

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: env ## every benchmark; the peers come with the extra `bench`
	$(BIN)/python -m pip install -q -e '.[bench]'
	for file in benchmarks/[!_]*.py; do $(BIN)/python $$file $(BENCH_FLAGS) || exit 1; done

env: $(VENV)/.complete

# The stamp is written last, so an install that was cut short starts again.
$(VENV)/.complete: pyproject.toml
	@"$(PYTHON)" -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" || { echo "Python 3.11 is needed: install it, or name it with make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[all]'
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info
