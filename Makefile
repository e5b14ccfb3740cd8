# Every target sets up what it needs. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quick demo docs test tests test-long test-fleet test-ray test-large test-gpu lint format clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Fedlens needs Python 3.11 or newer: try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# The documentation as a site, offline: docs/_build/index.html.
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python tools/gallery.py docs/_gallery
	rm -rf docs/_build  # pages of before, which are built no more
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build
	FEDLENS_SITE=docs/_build $(BIN)/pytest -q tests/test_site.py

# Under a minute, while you work: what most mistakes break.
QUICK := conformance network rounds core/test_keys.py engines/test_engines.py engines/test_stacked.py \
	engines/test_processes.py

quick: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow and not long and not fleet" $(addprefix tests/,$(QUICK))

demo: install
	$(BIN)/python examples/demo.py

# Both at once: mypy has one process, and leaves a core idle.
test: install
	$(MAKE) -j 2 lint tests

# Processes of one thread each: the tests' tensors are small, and threads would wait for each other.
# Three on two cores, since some tests wait for processes that they start.
# Tests start many processes, so what Python has compiled is kept, whatever the shell says.
tests: install
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

# What takes minutes or hours: many more kills, malformed files and rounds than in `make test`.
test-long: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m long

# Federations of real processes, with every fault that they may have: half an hour and more.
test-fleet: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -s -m fleet tests/fleet

test-large: install
	FEDLENS_LARGE=1 $(BIN)/pytest -s --durations=1 tests/data/test_large.py

# Every algorithm on a Ray cluster, actors, nodes and drivers killed at random: some minutes.
test-ray: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	OMP_NUM_THREADS=1 FEDLENS_RAY=1 $(BIN)/pytest tests/engines/test_ray.py tests/engines/test_ray_nodes.py tests/runs/test_spread.py

# On a GPU, by any Python that has torch and triton: PYTHON chooses it, nothing is installed.
test-gpu:
	PYTHONPATH=src:. $(PYTHON) -m tests.gpu.parts

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
