# Everything runs in .venv. Of the machine: python3.11, 3.12 or 3.13, a C++20 compiler and make; cmake and ninja come from
# PyPI. Where pip is not configured for CPU builds of torch:
#   make setup PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_FLAGS ?=
BIN := .venv/bin
STAMP := .venv/.setup-done
NATIVE_SOURCES := $(wildcard csrc/*.cpp csrc/*.hpp csrc/probes/* csrc/snapshot/* csrc/mindio/* csrc/fake/*)
CXX_SOURCES = $(shell find csrc tests -name '*.cpp' -o -name '*.hpp' -o -name '*.c' -o -name '*.h')
SANITIZERS := plain address thread
# ThreadSanitizer of older compilers cannot place its memory under full address randomisation.
FIXED_ADDRESSES := $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

.PHONY: setup wheel newcomer demo test test-full test-integrations test-mindspore test-torch test-native lint lint-ruff lint-format lint-types lint-layers lint-cxx \
    format clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# Build isolation would install a second set of build tools, unpinned; so they go into the venv first.
# scikit-build-core puts the compiled module into site-packages and finds the Python files in src as they are now. The
# look-alike device libraries go there too; a wheel for users has none.
$(STAMP): pyproject.toml CMakeLists.txt constraints.txt $(NATIVE_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt scikit-build-core nanobind cmake ninja torch==2.13.0
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt \
	    --no-build-isolation -C cmake.define.RESILIENT_FAKES=ON -e '.[torch,data,test,lint]'
	touch $@

# What a user installs: no look-alikes. In a build directory of its own, or the development install would be rebuilt.
WHEEL ?= dist
wheel: setup
	rm -rf $(WHEEL)/*.whl
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel -q $(PIP_FLAGS) --no-deps --no-build-isolation \
	    -C build-dir=build/wheel -w $(WHEEL) .

# The first hour of a newcomer, recorded: tests/newcomer/newcomer.py says what is done. Some minutes; writes below /tmp.
newcomer: wheel
	rm -rf build/newcomer /tmp/tutorial /tmp/tutorial2 /tmp/tutorial3
	set -o pipefail; $(PYTHON) tests/newcomer/newcomer.py dist/*.whl build/newcomer --pip-flags "$(PIP_FLAGS)" \
	    2>&1 | tee build/newcomer.log

# Trainers of other libraries, in an environment of their own (a gigabyte). torch first and pinned: they would fetch a
# CUDA build.
INTEGRATIONS := build/integrations
test-integrations: wheel
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install -q $(PIP_FLAGS) torch==2.13.0
	$(INTEGRATIONS)/bin/python -m pip install -q $(PIP_FLAGS) torch==2.13.0 -r tests/integrations/requirements.txt
	$(INTEGRATIONS)/bin/python -m pip install -q $(PIP_FLAGS) --no-deps --force-reinstall $(WHEEL)/*.whl
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations $(PYTEST_FLAGS)

demo: setup
	$(BIN)/resilient-train demo

# Jobs wait more than they work: two workers keep two cores busy.
WORKERS ?= 2
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

# All stories, with all parameters: to be run before an issue ends. An hour and a half.
test-full: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "long or not long" $(PYTEST_FLAGS)

# MindSpore's own callback over our mindio_ttp, in an environment of its own (3 GB: it needs numpy 1).
MINDSPORE := build/mindspore
test-mindspore: wheel
	test -x $(MINDSPORE)/bin/python || $(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/python -m pip install -q $(PIP_FLAGS) -r tests/on_mindspore/requirements.txt
	$(MINDSPORE)/bin/python -m pip install -q $(PIP_FLAGS) --no-deps mindformers==2.1.0 # one class of it, see mindformers_monitor.py
	$(MINDSPORE)/bin/python -m pip install -q $(PIP_FLAGS) --no-deps --force-reinstall $(WHEEL)/*.whl
	$(MINDSPORE)/bin/python -m pytest tests/on_mindspore $(PYTEST_FLAGS)

# Another torch, in an environment of its own (5 GB where PyPI has CUDA builds only; they run on the CPU as well).
# PYTEST_FLAGS for a part of the tests. To try a TORCH that is refused, name it in `frameworks/supported.py` first.
TORCH ?= 2.15.0
OTHER_TORCH = build/torch-$(TORCH)-$(notdir $(PYTHON))
test-torch:
	test -x $(OTHER_TORCH)/bin/python || $(PYTHON) -m venv $(OTHER_TORCH)
	$(OTHER_TORCH)/bin/python -m pip install -q $(PIP_FLAGS) torch==$(TORCH) scikit-build-core nanobind \
	    cmake ninja
	PATH="$(CURDIR)/$(OTHER_TORCH)/bin:$$PATH" $(OTHER_TORCH)/bin/python -m pip install -q $(PIP_FLAGS) \
	    --no-build-isolation -C build-dir=$(OTHER_TORCH)/native -C cmake.define.RESILIENT_FAKES=ON -e '.[data,test]'
	$(OTHER_TORCH)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-native: setup $(SANITIZERS:%=test-native-%)

# die_after_fork: the tests fork, and start threads in the children, on purpose.
.PHONY: $(SANITIZERS:%=test-native-%)
$(SANITIZERS:%=test-native-%): test-native-%: setup
	$(BIN)/cmake -S . -B build/native-$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --log-level=WARNING \
	    -DRESILIENT_TESTS=ON -DRESILIENT_SANITIZE=$(filter-out plain,$*)
	$(BIN)/cmake --build build/native-$*
	TSAN_OPTIONS=die_after_fork=0 timeout 120 $(FIXED_ADDRESSES) build/native-$*/native_test
	TSAN_OPTIONS=die_after_fork=0 timeout 120 $(FIXED_ADDRESSES) build/native-$*/probes_test
	TSAN_OPTIONS=die_after_fork=0 timeout 120 $(FIXED_ADDRESSES) build/native-$*/snapshot_test
	TSAN_OPTIONS=die_after_fork=0 timeout 120 $(FIXED_ADDRESSES) build/native-$*/ttp_test

# One target each, so that `make -k lint` shows everything that is wrong at once.
lint: lint-ruff lint-format lint-types lint-layers lint-cxx
lint-ruff: setup
	$(BIN)/ruff check .
lint-format: setup
	$(BIN)/ruff format --check .
lint-types: setup
	$(BIN)/mypy
lint-layers: setup
	$(BIN)/lint-imports
lint-cxx: setup
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: setup
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
