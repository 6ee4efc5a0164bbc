# `make` lists the actions. Each is one short script in scripts/ or one line here.

VENV := .venv
PYTHON ?= python3
SOURCES := $(shell find src native CMakeLists.txt pyproject.toml README.md -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: help demo test check check-long bench clean
help:
	@echo "make demo    train a small network on handwritten digits with 4 processes"
	@echo "make test    run all tests"
	@echo "make check   formatting, types, import contracts"
	@echo "make check-long  200 kills of a training job and 200 within collectives, 10,000 random"
	@echo "                 collectives, the same under sanitizers, PyTorch's own tests at three world"
	@echo "                 sizes (about an hour; needs torch, scikit-learn)"
	@echo "make bench   measure against torchrun and gloo (needs: .venv/bin/pip install torch)"
	@echo "make clean   remove everything that make made"

# The environment holds the package as users get it: a normal install, renewed when a source changes.
$(VENV)/.created: pyproject.toml scripts/create_venv
	@scripts/create_venv $(PYTHON) $(VENV)

$(VENV)/.installed: $(VENV)/.created $(SOURCES) scripts/install
	@scripts/install $(VENV)

demo: $(VENV)/.installed
	@scripts/demo $(VENV)

test: $(VENV)/.installed
	@scripts/test $(VENV) $(TESTS)

check: $(VENV)/.installed
	@scripts/check $(VENV)

check-long: $(VENV)/.installed
	@RALLYPOINT_TEST_KILLS=200 $(VENV)/bin/python -m pytest -s tests/system/test_restart.py -k random
	@RALLYPOINT_TEST_COLLECTIVE_KILLS=200 $(VENV)/bin/python -m pytest -s tests/system/test_random_kills.py
	@RALLYPOINT_TEST_OPERATIONS=10000 $(VENV)/bin/python -m pytest -s tests/properties/test_collectives.py
	@RALLYPOINT_TEST_BACKWARD_KILLS=100 $(VENV)/bin/python -m pytest -s tests/system/test_torch_kills.py
	@PYTHON=$(VENV)/bin/python scripts/sanitize
	@RALLYPOINT_TEST_TORCH_SUITE=all $(VENV)/bin/python -m pytest -s tests/system/test_torch_suite.py

bench: $(VENV)/.installed
	@scripts/bench $(VENV)

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
