# `make` lists the actions. Each is one short script in scripts/ or one line here.

VENV := .venv
PYTHON ?=
SOURCES := $(shell find src native CMakeLists.txt pyproject.toml README.md -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: help demo quick test test-all test-torch test-gpu test-aarch64 wheel release check docs docs-serve pages sanitize fuzz coverage check-long bench pictures records clean
help:
	@echo "make demo    train a small network on handwritten digits with 4 processes"
	@echo "make quick   the tests to run before a commit: under a minute, nothing is built or installed"
	@echo "make test    the tests that a change must pass, in four to ten minutes; TESTS=... runs others;"
	@echo "             a test that fails runs once more, alone, and is named"
	@echo "make test-all  the other tests, in about fifteen minutes"
	@echo "make test-torch  the tests that need PyTorch, with the newest one (VERSION=2.14.1: with that one),"
	@echo "                 which goes into an environment of its own (several GB; TESTS=... runs some of them)"
	@echo "make test-gpu  the tests that need a GPU, and PyTorch in .venv (RALLYPOINT_TEST_DEVICE=cpu: the"
	@echo "               same tests with the CPU in its place)"
	@echo "make wheel   wheels for x86-64 and aarch64, glibc 2.28 and newer, into dist/ (needs Python 3.11 and a"
	@echo "             newer one; PYTHONS='python3.11 python3.13' names others)"
	@echo "make release the files of a release, checked, in dist/: make wheel, source distribution, checksums"
	@echo "make test-aarch64  the native unit tests for aarch64, emulated (needs qemu and a cross-compiler)"
	@echo "make check   formatting, types, import contracts, the words of pages"
	@echo "make docs    build the documentation site into site/; make docs-serve shows it at 127.0.0.1:8000"
	@echo "make pages   write the pages that follow from other files: --help, decisions, measurements"
	@echo "make pictures  run what the pictures of terminals and browsers in docs/images/ show, and write them anew"
	@echo "make sanitize  the native store and engine under sanitizers, for three minutes"
	@echo "make fuzz    what no peer would send, to all that parses in native code, for a minute and a"
	@echo "             half (needs clang)"
	@echo "make coverage  all tests once more, and which lines of each room they run, in Python and C++;"
	@echo "             fails below 85 %, or if a test fails (needs clang and llvm; TESTS=... runs some)"
	@echo "make check-long  200 kills of a training job and 200 within collectives, 10,000 random"
	@echo "                 collectives, 2,000 interrupts, 320 kills and 200 stops of ranks that go"
	@echo "                 on in place, two hours of kills, stops and cuts, 50 runs of what needs bad luck, 20,000"
	@echo "                 simulated clusters for each way to agree, half an hour under load,"
	@echo "                 sanitizers, fuzzers, DeepSpeed, PyTorch's own tests at three world sizes, coverage"
	@echo "                 (more than six hours; needs torch, scikit-learn, clang, llvm)"
	@echo "make bench   measure against torchrun and gloo (needs: .venv/bin/pip install torch)"
	@echo "make records  measure anew what the performance page shows (needs torch, and a quiet machine)"
	@echo "make clean   remove everything that make made"

# The environment holds the package as users get it: a normal install, renewed when a source changes,
# and made anew when another PYTHON is named.
OTHER_PYTHON := $(if $(PYTHON),$(shell scripts/create_venv --differs "$(PYTHON)" $(VENV)))
.PHONY: other-python
$(VENV)/.created: pyproject.toml scripts/create_venv $(if $(OTHER_PYTHON),other-python)
	@scripts/create_venv "$(PYTHON)" $(VENV)

$(VENV)/.installed: $(VENV)/.created $(SOURCES) scripts/install
	@scripts/install $(VENV)

demo: $(VENV)/.installed
	@scripts/demo $(VENV)

quick:
	@scripts/quick $(VENV)

test: $(VENV)/.installed
	@$(if $(TESTS),$(VENV)/bin/python -m pytest $(TESTS),scripts/test $(VENV) everyday)

test-all: $(VENV)/.installed
	@scripts/test $(VENV) rest $(TESTS)

test-torch: $(VENV)/.installed
	@scripts/test_torch $(VENV) "$(VERSION)" $(TESTS)

test-gpu: $(VENV)/.installed
	@scripts/twice $(VENV)/bin/python -v tests/gpu $(TESTS)

test-aarch64:
	@scripts/test_aarch64

wheel:
	@scripts/wheel $(PYTHONS)

release:
	@rm -rf dist
	@scripts/wheel $(PYTHONS)
	@scripts/release $(firstword $(PYTHONS))

check: $(VENV)/.installed
	@scripts/check $(VENV)

docs:
	@scripts/docs "$(or $(PYTHON),python3)" .venv-docs

docs-serve:
	@scripts/docs serve "$(or $(PYTHON),python3)" .venv-docs

pages: $(VENV)/.installed
	@$(VENV)/bin/python scripts/site/pages.py

sanitize: $(VENV)/.installed
	@PYTHON=$(VENV)/bin/python scripts/sanitize --smoke

fuzz:
	@scripts/fuzz

coverage: $(VENV)/.installed
	@scripts/coverage $(VENV) $(TESTS)

check-long: export RALLYPOINT_TEST_SOON_S ?= 1
check-long: $(VENV)/.installed
	@RALLYPOINT_TEST_KILLS=200 $(VENV)/bin/python -m pytest -s tests/system/test_restart.py -k random
	@RALLYPOINT_TEST_COLLECTIVE_KILLS=200 $(VENV)/bin/python -m pytest -s tests/system/test_random_kills.py
	@RALLYPOINT_TEST_INTERRUPTS=2000 $(VENV)/bin/python -m pytest -s tests/system/test_interrupts.py
	@RALLYPOINT_TEST_TIMES=50 $(VENV)/bin/python -m pytest -m repeated tests/system
	@for kind in peers etcd store ideal; do \
	  $(VENV)/bin/python -m tests.simulation.sim_story 0 20000 1 $$kind || exit 1; done
	@for kind in peers etcd static plug-in; do \
	  $(VENV)/bin/python -m tests.simulation.sim_driver_story 0 20000 $$kind || exit 1; done
	@RALLYPOINT_TEST_EACH_WAY=1 $(VENV)/bin/python -m pytest tests/system/test_launched.py \
	  tests/system/test_backends.py tests/system/test_refusals.py
	@RALLYPOINT_TEST_EACH_WAY=1 $(VENV)/bin/python -m pytest --part rest -m sampled \
	  tests/unit tests/properties tests/simulation
	@RALLYPOINT_TEST_EACH_WAY=1 $(VENV)/bin/python -m pytest --part rest -m seldom tests/system
	@RALLYPOINT_TEST_LOAD_S=1800 $(VENV)/bin/python -m pytest -s tests/system/test_load.py
	@RALLYPOINT_TEST_OPERATIONS=10000 $(VENV)/bin/python -m pytest -s tests/properties/test_collectives.py
	@RALLYPOINT_TEST_ORDERS=all $(VENV)/bin/python -m pytest -s tests/unit/elastic/test_agreement.py
	@RALLYPOINT_TEST_IN_PLACE_KILLS=100 $(VENV)/bin/python -m pytest -s tests/system/test_in_place.py -k bits
	@RALLYPOINT_TEST_KILL_POINTS=100 $(VENV)/bin/python -m pytest -s tests/system/test_in_place_kills.py
	@RALLYPOINT_TEST_PARTITIONS=50 $(VENV)/bin/python -m pytest -s tests/system/test_in_place_hosts.py
	@RALLYPOINT_TEST_EARLY_ENDS=1000 $(VENV)/bin/python -m pytest -s tests/system/test_early_ends.py
	@RALLYPOINT_TEST_STOPS=100 $(VENV)/bin/python -m pytest -s tests/system/test_reforming.py -k stopped
	@RALLYPOINT_TEST_BUCKET_KILLS=20 $(VENV)/bin/python -m pytest -s tests/system/test_elastic_torch.py -k option
	@RALLYPOINT_TEST_BACKWARD_KILLS=100 $(VENV)/bin/python -m pytest -s tests/system/test_torch_kills.py
	@for where in one-host hosts; do $(VENV)/bin/python -m tests.chaos $$where || exit 1; done
	@PYTHON=$(VENV)/bin/python scripts/sanitize
	@scripts/fuzz 300
	@DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install --quiet --no-build-isolation --group torch-libraries-long
	@RALLYPOINT_TEST_LIBRARIES=long $(VENV)/bin/python -m pytest -s tests/system/test_torch_libraries.py -k 'deepspeed or switch'
	@WITH=torchft-nightly scripts/test_torch $(VENV) "" -s tests/system/test_torch_libraries.py -k nightly
	@RALLYPOINT_TEST_TORCH_SUITE=all $(VENV)/bin/python -m pytest -s tests/system/test_torch_suite.py
	@env -u RALLYPOINT_TEST_SOON_S scripts/coverage $(VENV)  # measuring slows Python down

bench: $(VENV)/.installed
	@scripts/bench $(VENV)

pictures: $(VENV)/.installed
	@$(VENV)/bin/python scripts/site/pictures.py

records: $(VENV)/.installed
	@scripts/records $(VENV)

clean:
	rm -rf $(VENV) .venv-torch-* .venv-docs site build dist .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
