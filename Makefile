# `make serve` and `make test` do all the set-up: a virtual environment, the package, the weights.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients

.PHONY: serve test test-clients soak lint install install-dev demo clean

serve: $(VENV)/.installed
	$(BIN)/vllm-mini serve

demo: $(VENV)/.installed
	$(BIN)/python -m vllm_mini.demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

# other people's clients against a real server, in an environment of their own
test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed
	cd client_tests && ../$(CLIENTS)/bin/python -m pytest -c /dev/null --rootdir . -p no:cacheprovider .

# ten minutes of clients that hang, leave and send garbage
soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py

$(CLIENTS)/.installed: client_tests/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet -r $<
	touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# torch first and by itself, so that no later step chooses another build of it
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[structured]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[test,lint]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) $(CLIENTS) build *.egg-info
