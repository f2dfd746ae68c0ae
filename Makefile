# `make demo` and `make test` need nothing but Python (3.11 or newer) and a package index.
export OMP_NUM_THREADS ?= 1
PYTHON ?= python3
# Versions of all packages; `make unit PYTHON=python3.13 CONSTRAINTS=/dev/null` takes the newest ones.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test fuzz fuzz-quick chaos test-slow paper-test paper-quick portable-test distributed-test browser-test coverage docs lint types unit dist format clean

demo: $(VENV)/demo.stamp
	$(BIN)/smoothhess demo --out build/demo

test: lint types unit

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[demo]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev]'
	touch $@ $(VENV)/demo.stamp

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/basedpyright

unit: $(VENV)/dev.stamp
	$(BIN)/pytest -q -n 2 -m "not slow" --ignore=tests/datasets/distributed --ignore=tests/browser

# The same with the share of lines and branches that the tests go through; a quarter slower.
coverage: $(VENV)/dev.stamp
	$(BIN)/pytest -q -n 2 -m "not slow" --ignore=tests/datasets/distributed --ignore=tests/browser --cov --cov-report=term

test-slow: $(VENV)/dev.stamp
	$(BIN)/pytest -q -n 2 -m slow --ignore=tests/datasets/distributed

# Seeded damage of every file that is read: an error that names the file, or the same values. `make fuzz SECONDS=60 SEED=1`.
SECONDS := 270
SEED := 0
fuzz: $(VENV)/dev.stamp
	$(BIN)/python -W ignore -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

fuzz-quick: $(VENV)/dev.stamp
	$(BIN)/python -W ignore -m tests.fuzz --seconds 20 --seed $(SEED)

# Killed writers, full disks, ranks that differ: resumed to the same records, or refused. Minutes on two cores.
chaos: $(VENV)/dev.stamp
	$(BIN)/python -W ignore -m tests.chaos --seed $(SEED)

# The paper's experiments: their code, and with a few points and short trainings every table and figure.
paper-test: $(VENV)/dev.stamp
	$(BIN)/pytest -q -n 2 paper

paper-quick: $(VENV)/dev.stamp
	$(BIN)/python -m paper all --quick

# What depends on rounding: with 2 threads as a CPU without AVX computes it, with 4 threads as one without AVX-512 does.
# Threads that wait must not spin: there are more of them than cores.
ROUNDING := OMP_WAIT_POLICY=passive $(BIN)/pytest -q -n 2 -m "rounding and not slow" paper/tests tests/evaluate/test_sanity.py tests/evaluate/test_sweep.py tests/explainers/test_diagnose_model.py tests/result/test_interactions.py tests/estimate/test_incomplete_blocks.py
portable-test: $(VENV)/dev.stamp
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OMP_NUM_THREADS=2 $(ROUNDING)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=4 $(ROUNDING)

# Two processes of torch.distributed on this machine; they use all cores, so one test at a time.
distributed-test: $(VENV)/dev.stamp
	$(BIN)/pytest -q tests/datasets/distributed

# The pages in a real browser.
browser-test: $(VENV)/dev.stamp
	@for b in chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	  command -v $$b >/dev/null && exit 0; done; echo "browser-test needs Chromium, e.g. apt-get install chromium"; exit 1
	$(BIN)/pytest -q tests/browser

# The documentation, into build/docs; a warning is an error.
docs: $(VENV)/docs.stamp
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	@echo "open build/docs/index.html"

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

# Builds the source distribution, and the wheel from it, checks both, and runs the demo of each in a new environment, in
# build/; pytest imports all tests from the unpacked source distribution.
dist: $(VENV)/dev.stamp
	rm -rf dist build/dist && mkdir -p build/dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	tar xzf dist/*.tar.gz -C build/dist --strip-components=1
	cd build/dist && PYTHONPATH=src "$(CURDIR)/$(BIN)/pytest" -q --collect-only tests paper >collected.txt || { tail -n 40 collected.txt; exit 1; }
	cd build/dist && PYTHONPATH=src "$(CURDIR)/$(BIN)/pytest" -q tests/test_*.py
	for package in dist/*; do \
	  rm -rf build/dist-venv build/dist-demo && $(PYTHON) -m venv build/dist-venv && \
	  build/dist-venv/bin/python -m pip install --quiet -c $(CONSTRAINTS) "$$package" && \
	  (cd build && dist-venv/bin/python -c "import smoothhess; smoothhess.SmoothHess") && \
	  build/dist-venv/bin/python -m pip install --quiet -c $(CONSTRAINTS) "$$package[demo]" && \
	  (cd build && dist-venv/bin/smoothhess --version && dist-venv/bin/smoothhess demo --out dist-demo) || exit 1; \
	done
	rm -rf build/dist build/dist-venv build/dist-demo

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .coverage smoothhess-demo
