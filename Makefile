# From a fresh clone to a result, with Python >= 3.11 and a C++ compiler:
#   make demo      export the example model, prove it equal to PyTorch, generate text with both
#   make test      everything that CI checks
#   make test-all  the same and the tests marked `slow`
#   make bench     speed beside PyTorch and ONNX Runtime; BENCH_ARGS="--cases decode" for a part of it
#   make kernels   the CUDA kernel pack, about half an hour on one core; installed, and in the wheels built from then on
#   make wheel     a wheel in dist/, with the kernel pack where there is one
# The first call makes .venv and installs the pinned set of requirements/; later calls start at once.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))))
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?= --compile --json build/benchmark.json

VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := $(VENV)/.requirements-installed
PACKAGE := $(VENV)/.package-installed
NATIVE_SOURCES := $(shell find custom_ops \( -name '*.h' -o -name '*.cc' -o -name '*.cpp' -o -name '*.txt' -o -name '*.lds' \) 2>/dev/null)
FORMATTED_SOURCES := $(filter-out custom_ops/include/qknorm/generated/%,$(filter %.h %.cc %.cpp,$(NATIVE_SOURCES)))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Workers of pytest share the cores: more threads in each of them only make the run slower.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q

# An older onnxruntime in an environment of its own: files must be right there, too.
OLD_RUNTIME := build/runtimes/onnxruntime-1.24/.installed

.DELETE_ON_ERROR:
.PHONY: help demo test test-all bench kernels wheel install lint format types floors generated docs pytest clean

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

demo: $(PACKAGE)
	$(BIN)/python examples/demo.py

test: lint types floors generated docs $(OLD_RUNTIME)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: lint types floors generated docs $(OLD_RUNTIME)
	$(PYTEST) $(PYTEST_ARGS)

bench: $(PACKAGE)
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

# Without a GPU and without a CUDA toolkit. The pack is data of the package: the last line puts it beside the library.
kernels: $(PACKAGE)
	$(BIN)/python -m qknorm_onnx.custom_ops.compile_kernels --jobs $(JOBS) --out build/cuda_kernels --report build/cuda_images.md
	$(PIP) install --no-build-isolation --no-deps -e .

wheel: $(PACKAGE)
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist --config-settings=build-dir=build/wheel \
		--config-settings=cmake.define.QKNORM_WARNINGS_AS_ERRORS=ON .

install: $(PACKAGE)

lint: $(PACKAGE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --diff .
	$(if $(FORMATTED_SOURCES),$(BIN)/clang-format --dry-run --Werror $(FORMATTED_SOURCES))

format: $(PACKAGE)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(if $(FORMATTED_SOURCES),$(BIN)/clang-format -i $(FORMATTED_SOURCES))

types: $(PACKAGE)
	$(BIN)/python tests/architecture/installed_layout.py types

floors: $(PACKAGE)
	$(BIN)/python tests/architecture/installed_layout.py floors

generated: $(PACKAGE)
	$(BIN)/python -m qknorm_onnx.spec.cpp_header --check

docs: $(PACKAGE)
	$(BIN)/python -m tools.generate_docs --check

pytest: $(PACKAGE) $(OLD_RUNTIME)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

$(OLD_RUNTIME): requirements/runtimes/onnxruntime-1.24.txt | $(PACKAGE)
	$(BIN)/python -m tools.runtimes.environments onnxruntime-1.24
	@touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found (no onnxruntime >= 1.24 exists for an older one); name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(REQUIREMENTS): requirements/dev.txt requirements/runtime.txt requirements/build.txt | $(BIN)/python
	$(PIP) install -r requirements/dev.txt
	@touch $@

$(PACKAGE): $(REQUIREMENTS) pyproject.toml $(wildcard CMakeLists.txt) $(NATIVE_SOURCES)
	$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@
