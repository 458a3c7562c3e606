# Two commands do everything: `make serve` and `make test`. Both make .venv when it is missing.
PYTHON ?= $(shell sh scripts/find_python.sh)
VENV := .venv
RUN := $(VENV)/bin/python
ARGS ?=

.PHONY: serve test bench clean

serve: $(VENV)/.installed
	$(RUN) -m jpaged.serve $(ARGS)

test: $(VENV)/.installed-test
	$(RUN) -m pytest $(ARGS)

# Beside its peers, which are installed under build/peers at the first time: that alone takes some minutes.
bench: $(VENV)/.installed
	$(RUN) scripts/peers/install.py
	$(RUN) scripts/peers/compare.py $(ARGS)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "jpaged needs Python 3.12 or newer, and none was found: install python3.12 (or newer) with its venv module, or give one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
