# `make demo` and `make test` set up everything they need in a virtual environment of their own.
#
#   PYTHON        the interpreter to build it with (3.11 to 3.13)
#   VENV          where it goes
#   JAX           which jax to test with, for example JAX='jax==0.10.2'
#   TORCH         a torch requirement to install for the tests that exchange tensors with it,
#                 for example TORCH='torch==2.13.0'; empty leaves them out, and the run says so
#   BROWSER       a browser to install for the tests of the server's page, for example
#                 BROWSER='PyQt6-WebEngine==6.11.0'; empty leaves them out, and the run says so
#   PYTEST_ARGS   passed on, for example PYTEST_ARGS='-n 0 -k pool'
#   BUILD_OUTPUT  how much pip shows of the build, which takes minutes where nvcc is found: -v for
#                 all of it, --quiet for nothing
PYTHON ?= python3
VENV ?= .venv
JAX ?= jax>=0.10.2
TORCH ?=
BROWSER ?=
PYTEST_ARGS ?=
BUILD_OUTPUT ?= -v
BIN = $(VENV)/bin
SOURCES = pyproject.toml CMakeLists.txt $(shell find cpp jax_kvblock -name '*.py' -o -name '*.h' \
  -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cu.in')

# What the package needs, with an extra: installed by name, since pip would build `.[extra]` again.
NEEDS = $(BIN)/python -c "import sys, tomllib; \
  project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
  print(*project['dependencies'], *project['optional-dependencies'][sys.argv[1]])"

.PHONY: demo test test-all lint style format bench gpu-test sweep stress mutants gpu-mutants report clean

# The package, built from this folder. Tests and examples import what was installed.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(BUILD_OUTPUT) --force-reinstall --no-deps .
	$(BIN)/python -m pip install --quiet '$(JAX)' $$($(NEEDS) test)
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -r examples/requirements.txt
	$(BIN)/python examples/demo.py
	$(BIN)/python examples/serve --check --drafts 4 --blocks 40 --host-mib 64

# The suite without its widest sweeps and what is slow, a process for each core; CI takes some sweeps.
test: WIDE = -m 'not wide and not slow'
test test-all: $(VENV)/.installed
	$(if $(TORCH),$(BIN)/python -m pip install --quiet '$(TORCH)')
	$(if $(BROWSER),$(BIN)/python -m pip install --quiet '$(BROWSER)')
	$(if $(TORCH),KVBLOCK_REQUIRE_TORCH=1) $(if $(BROWSER),KVBLOCK_REQUIRE_BROWSER=1) \
	  $(BIN)/pytest -q -n auto --dist worksteal $(WIDE) $(PYTEST_ARGS)

# For a machine whose Python already holds jax with CUDA (and torch and CuPy, if they are to be
# tested): builds against it, installs next to it, runs the suite on the GPU and fails without one.
# The record of a whole run goes to benchmarks/results/<gpu>/tests-<date>.json, that of a run with
# PYTEST_ARGS='-k ...' to part-of-tests-<date>.json.
GPU_TARGET ?= build/gpu
GPU_RECORD ?= benchmarks/results
GPU_LIBRARY = $(GPU_TARGET)/jax_kvblock/lib/libkvblock.so
$(GPU_LIBRARY): $(SOURCES)
	KVBLOCK_CUDA=ON $(PYTHON) -m pip install $(BUILD_OUTPUT) --no-build-isolation --no-deps --upgrade \
	  -C cmake.define.KVBLOCK_LINEINFO=ON --target $(GPU_TARGET) .
	touch $@

# Tests of several GPUs need all of them at once: others beside them are few there.
GPU_PROCESSES ?= $(shell gpus=$$(nvidia-smi -L 2>/dev/null | wc -l); most=16; \
  [ $$gpus -ne 2 ] || most=32; cores=$$(nproc); echo $$((cores < most ? cores : most)))

gpu-test: $(GPU_LIBRARY)
	PYTHONPATH="$(abspath $(GPU_TARGET))" KVBLOCK_REQUIRE_GPU=1 $(PYTHON) -P -m pytest -q \
	  -n $(GPU_PROCESSES) --dist worksteal --record=$(GPU_RECORD) $(PYTEST_ARGS) tests

# Standalone on a GPU, by the C interface: thousands of calls against float64 (about a minute each),
# and what may go wrong between CTAs. SWEEP_ARGS='--only D128', for example.
sweep: $(GPU_LIBRARY)
	$(PYTHON) tests/support/attention_sweep.py $(GPU_LIBRARY) --out build/sweep.json $(SWEEP_ARGS)

stress: $(GPU_LIBRARY)
	$(PYTHON) tests/support/attention_stress.py $(GPU_LIBRARY) --out build/stress.json $(SWEEP_ARGS)

# Small mistakes, each put into a copy of the sources: what has to notice them does. The kernels' own
# on a GPU, with the objects of the build there.
mutants: $(VENV)/.installed
	$(BIN)/python tests/support/mutants.py $(MUTANT_ARGS)

gpu-mutants: $(GPU_LIBRARY)
	$(PYTHON) tests/support/mutants.py $(MUTANT_ARGS) \
	  --gpu "$$(dirname "$$(ls -t build/*/compile_commands.json | head -n 1)")"

bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $$($(NEEDS) bench)
	$(BIN)/python -P benchmarks/run.py $(BENCH_ARGS)

report: $(VENV)/.installed
	$(BIN)/python -P -m jax_kvblock

$(VENV)/.lint: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet ruff==0.17.5 clang-format==23.1.5 mypy==2.4.1 'pyright[nodejs]==1.1.414'
	touch $@

CPP = $(shell git ls-files 'cpp/*.h' 'cpp/*.cc' 'cpp/*.cu' 'cpp/*.cuh' 'examples/*.cu' 'examples/*.cuh')
# What needs no build comes first.
lint: style $(VENV)/.installed
	$(BIN)/mypy --python-executable $(BIN)/python

style: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist .venv*
