# Everything runs in .venv, which is made on first use and again only when the project's dependencies change.
PYTHON ?= python3
VENV := .venv
# An environment that forbids it would make every process of a run compile the sources again.
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-all pytest test-torch lint conformance chaos chaos-hosts checkpoints simulate convergence plan-accuracy compiled bench bench-hosts docs clean

help:
	@echo "make demo         set up, train, kill a worker, prove that the bits are those of one, write a report"
	@echo "make test         set up, lint, type-check, run the tests"
	@echo "make test-all     the slow tests too: most of an hour on two cores"
	@echo "make test-torch VERSION=2.x.y   the core tests with the CPU build of another torch, in build/torch-VERSION"
	@echo "make lint         ruff and mypy"
	@echo "make conformance  PyTorch's own tests: of DDP against our class, of collectives against shm (QUICK=1: ours only)"
	@echo "make chaos        500 kills in every collective of shm; 2,000 kills and 200 stops of workers that train, 300 of them"
	@echo "                  in one run; 500 workers one step behind; 5,000 wrong results; resizing; hostile messages (QUICK=1: fewer)"
	@echo "make chaos-hosts  100 cuts through the network of three hosts made of network namespaces (needs root)"
	@echo "make checkpoints  damages and kills in every call of a save (QUICK=1: fewer)"
	@echo "make simulate     1,000,000 schedules of the membership protocol (QUICK=1: fewer)"
	@echo "make convergence  the examples learn what they say, on several seeds; batch x 8 as good; compressed gradients (QUICK=1: fewer)"
	@echo "make plan-accuracy  predictions of lockstep plan beside measurements; needs root for several hosts (QUICK=1: fewer)"
	@echo "make compiled     how long until compiled workers and their replacements train; ends with status 1 above 2 s (QUICK=1: fewer)"
	@echo "make bench        step time beside torch DDP, collectives beside Gloo (QUICK=1: fewer rounds)"
	@echo "make docs         the documentation as a site with search, in build/docs (works without a network)"
	@echo "make bench-hosts  collectives over two hosts made of network namespaces (needs root)"

# pip works on one core, and would compile all that is installed: so torch is compiled meanwhile, as far as it is used.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lockstep needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c 'import torch._dynamo.trace_rules, torch.distributed.optim' 2> /dev/null & \
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'; \
	status=$$?; wait; exit $$status
	@touch $@

demo: $(READY)
	$(BIN)/lockstep demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# With a third file at a time they take longer, on two cores.
# Files begin in the order of tests/conftest.py, not those with the most tests first.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

test-all: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest ALL="-m ''"

# Tests wait now and then; the type check runs meanwhile.
pytest: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ALL)

# The core tests with another torch, in an environment of its own. Only CPU builds: those of PyPI bring gigabytes of CUDA.
TORCH_VENV = build/torch-$(VERSION)
TORCH_BIN = $(TORCH_VENV)/bin
CPU_BUILDS := https://download.pytorch.org/whl/cpu
CORE_TESTS := $(addprefix tests/test_,$(addsuffix .py,torch_names ddp ddp_arguments run shm_calls shm_parts one_digest))

test-torch:
	@test -n '$(VERSION)' || { echo "make test-torch VERSION=2.x.y"; exit 2; }
	test -x $(TORCH_BIN)/python || $(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_BIN)/python -m pip install --quiet --retries 1 --extra-index-url $(CPU_BUILDS) 'torch==$(VERSION)+cpu' || { \
	  echo "No CPU build of torch $(VERSION) was found, neither at $(CPU_BUILDS) nor where pip looks on this machine."; \
	  echo "Those that can be had here:"; \
	  $(TORCH_BIN)/python -m pip index versions torch --extra-index-url $(CPU_BUILDS) 2>&1 | grep -o '[0-9.]*+cpu' | sort -uV; \
	  exit 1; }
	@grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_BIN)/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt \
	  numpy rich expecttest matplotlib pytest pytest-timeout pytest-xdist scikit-learn
	$(TORCH_BIN)/python -m pip install --quiet --no-deps --editable .
	@result=$(TORCH_VENV)/result.txt; $(TORCH_BIN)/python -m pytest $(SIDE_BY_SIDE) $(CORE_TESTS) > $$result 2>&1; status=$$?; cat $$result; \
	  $(TORCH_BIN)/python -c 'import torch; print("torch", torch.__version__, end=": ")'; tail -n 1 $$result; exit $$status

conformance: $(READY)
	$(BIN)/python conformance/run.py $(if $(QUICK),--quick)
	$(BIN)/python conformance/backend.py $(if $(QUICK),--quick)
	$(BIN)/python conformance/run.py --quick --backend shm

chaos: $(READY)
	$(BIN)/python chaos/run.py $(if $(QUICK),--quick)
	$(BIN)/python chaos/training.py $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python chaos/training.py --sharded --kills 1000 --seeds 25)
	$(BIN)/python chaos/training_stops.py $(if $(QUICK),--quick)
	$(BIN)/python chaos/training_behind.py $(if $(QUICK),--quick --within-s 100)
	$(BIN)/python chaos/training_drains.py $(if $(QUICK),--quick)
	$(BIN)/python chaos/corruption.py $(if $(QUICK),--faults 60 --audits 600 --cost-steps 0)
	$(BIN)/python chaos/training_resize.py $(if $(QUICK),--backend shm)
	$(if $(QUICK),,$(BIN)/python chaos/training_soak.py)
	$(if $(QUICK),,$(BIN)/python chaos/training_hostile.py)

chaos-hosts: $(READY)
	$(BIN)/python chaos/training_hosts.py $(if $(QUICK),--quick)

checkpoints: $(READY)
	$(BIN)/python campaigns/checkpoints.py $(if $(QUICK),--quick)

simulate: $(READY)
	$(BIN)/python campaigns/membership.py --schedules $(if $(QUICK),20000,1000000) --workers 2

convergence: $(READY)
	$(BIN)/python campaigns/convergence.py $(if $(QUICK),--quick)
	$(BIN)/python campaigns/compression.py $(if $(QUICK),--quick)

plan-accuracy: $(READY)
	mkdir -p build/plan
	$(BIN)/python campaigns/plan_accuracy.py predict --data build/plan $(if $(QUICK),--count 6 --programs mlp)
	$(BIN)/python campaigns/plan_accuracy.py measure --beside --data build/plan
	$(BIN)/python campaigns/plan_branches.py $(if $(QUICK),--seeds 1)

compiled: $(READY)
	$(BIN)/python campaigns/compiled_workers.py $(if $(QUICK),--workers 2 --kills 2)

bench: $(READY)
	$(BIN)/lockstep bench step $(if $(QUICK),--quick)
	$(BIN)/lockstep bench exact $(if $(QUICK),--quick)
	$(BIN)/lockstep bench comm $(if $(QUICK),--quick)

bench-hosts: $(READY)
	$(BIN)/lockstep bench hosts $(if $(QUICK),--quick)
	$(BIN)/lockstep bench codecs $(if $(QUICK),--quick --models gpt)
	$(if $(QUICK),,$(BIN)/lockstep bench tuner)

docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
