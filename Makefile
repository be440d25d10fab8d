# Everything runs in .venv, which is made on first use and again only when the project's dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint conformance chaos convergence bench bench-hosts clean

help:
	@echo "make demo         set up, train on two workers, show the result"
	@echo "make test         set up, lint, type-check, run the tests"
	@echo "make lint         ruff and mypy"
	@echo "make conformance  PyTorch's own tests: of DDP against our class, of collectives against shm (QUICK=1: ours only)"
	@echo "make chaos        500 kills in every collective of shm (QUICK=1: fewer)"
	@echo "make convergence  the examples learn what they say, on several seeds; batch x 8 as good (QUICK=1: fewer)"
	@echo "make bench        step time beside torch DDP, collectives beside Gloo (QUICK=1: fewer rounds)"
	@echo "make bench-hosts  collectives over two hosts made of network namespaces (needs root)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lockstep needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/lockstep demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

conformance: $(READY)
	$(BIN)/python conformance/run.py $(if $(QUICK),--quick)
	$(BIN)/python conformance/backend.py $(if $(QUICK),--quick)
	$(BIN)/python conformance/run.py --quick --backend shm

chaos: $(READY)
	$(BIN)/python chaos/run.py $(if $(QUICK),--quick)

convergence: $(READY)
	$(BIN)/python campaigns/convergence.py $(if $(QUICK),--quick)

bench: $(READY)
	$(BIN)/lockstep bench step $(if $(QUICK),--quick)
	$(BIN)/lockstep bench exact $(if $(QUICK),--quick)
	$(BIN)/lockstep bench comm $(if $(QUICK),--quick)

bench-hosts: $(READY)
	$(BIN)/lockstep bench hosts $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
