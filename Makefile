# Two commands do all the set-up on a machine that has Python 3.11 and make:
#   make quickstart    installs, runs the first study on real data, says where the page is
#   make test          installs, runs the tests (TORCH=1 adds the comparisons with PyTorch)

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: quickstart test test-slow test-oldest bench lint format clean

quickstart: .venv/study
	$(BIN)/normjax run configs/level_side_route.yaml --force

test: .venv/dev $(if $(TORCH),.venv/torch)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: .venv/dev $(if $(TORCH),.venv/torch)
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

# The bounds of pyproject.toml; older packages warn of what newer JAX deprecates.
test-oldest: .venv-oldest/made
	.venv-oldest/bin/python -m pytest -n 2 -m "not slow" -o filterwarnings=default \
	  tests/operators tests/test_standardize_transforms.py tests/test_residuals.py \
	  tests/test_devices.py tests/test_devices_state.py tests/test_spec.py tests/test_linen.py tests/test_nnx.py

# Ratios to named peers, never asserted: a machine is as fast as its neighbours let it.
# A quarter of an hour; writes the tables of the README and its figure.
bench: .venv/dev
	cd tests && ../$(BIN)/python -m benchmarks.speed --readme
	cd tests && ../$(BIN)/python -m benchmarks.correctness --readme
	cd tests && ../$(BIN)/python -m benchmarks.streaming --readme
	cd tests && ../$(BIN)/python -m benchmarks.geometry
	cd tests && ../$(BIN)/python -m benchmarks.devices

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/made:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	touch $@

.venv/study: .venv/made pyproject.toml constraints.txt
	$(PIP) -e '.[study,data]'
	touch $@

.venv/dev: .venv/made pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ .venv/study

.venv/torch: .venv/dev
	$(PIP) torch==2.13.0
	touch $@

.venv-oldest/made: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet -e . \
	  jax==0.8.1 jaxlib==0.8.1 flax==0.12.2 optax==0.2.5 chex==0.1.90 \
	  pytest pytest-xdist hypothesis
	touch $@

clean:
	rm -rf .venv .venv-oldest runs
