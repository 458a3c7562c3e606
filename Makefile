# `make serve` and `make test` make .venv when it is missing. `make test-compile` proves the engine for chips that are not
# here, with their compilers, in a .venv-compile of its own (3 GB): beside them every import of jax looks for chips.
# `make test-long` is what CI runs of the suite beside `make test`. `make test-slow` runs what takes minutes each: the rest of
# the kernels in interpreters, long random walks, the real model's equalities.
PYTHON ?= $(shell sh scripts/find_python.sh)
VENV := .venv
RUN := $(VENV)/bin/python
COMPILE_VENV := .venv-compile
RUN_COMPILE := JAX_PLATFORMS=cpu $(COMPILE_VENV)/bin/python
ARGS ?=

.PHONY: serve test test-long test-slow test-compile test-gpu test-tpu bench clean

serve: $(VENV)/.installed
	$(RUN) -m jpaged.serve $(ARGS)

test: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

test-long: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 --dist loadfile -m "long and not slow" $(ARGS)

test-slow: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 --dist loadfile -m slow $(ARGS)

test-compile: $(COMPILE_VENV)/.installed
	$(RUN_COMPILE) -m pytest -n 2 -m compile tests/compile $(ARGS)

# On the chip, by the interpreter that has its JAX: make test-gpu PYTHON=python3. Installs nothing.
test-gpu test-tpu: test-%:
	$(PYTHON) tests/support/on_chip.py $*

# Beside its peers, which are installed under build/peers at the first time: that alone takes some minutes.
bench: $(VENV)/.installed
	$(RUN) scripts/peers/install.py
	$(RUN) scripts/peers/compare.py $(ARGS)

$(VENV)/bin/python $(COMPILE_VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "jpaged needs Python 3.12 or newer, and none was found: install python3.12 (or newer) with its venv module, or give one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(@D)/..

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

$(COMPILE_VENV)/.installed: $(COMPILE_VENV)/bin/python pyproject.toml constraints.txt constraints-compile.txt
	$(COMPILE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(COMPILE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-compile.txt
	touch $@

clean:
	rm -rf $(VENV) $(COMPILE_VENV) build *.egg-info
