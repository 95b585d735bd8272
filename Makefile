# Everything happens in VENV. The first use makes it, and later uses keep it. A VENV that exists is used as it
# is: make conform VENV="$$VIRTUAL_ENV".
CONNECTOR ?= reference_connector:ReferenceConnector
ARGS ?=
JOBS ?=
VLLM ?=
WITH ?=
VENV ?= .venv$(if $(VLLM),-$(VLLM))$(if $(WITH),-$(WITH))
PYTHON ?=
TORCH_INDEX ?=
DECLARATION = --kv-declare=reference_connector/declaration.toml
DECLARED = $(if $(filter reference_connector:%,$(CONNECTOR)),$(DECLARATION))
SETUP = VENV='$(VENV)' VLLM='$(VLLM)' PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' ci/setup.sh

# Some containers set it. Each of the processes of pytest would then compile the suite anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help conform test test-all test-night lint format docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make conform [CONNECTOR=...] [ARGS=...]   run the conformance suite on a connector"
	@echo "make test    [ARGS=...]                   run this project's own tests: those of some minutes"
	@echo "make test-all, make test-night            and those of connectors and servers; and the longest"
	@echo "make lint                                 ruff and mypy"
	@echo "make format                               let ruff rewrite the files"
	@echo "make docs                                 build the documentation as a site, in site/"
	@echo "make bench                                measure what docs/benchmarks.md quotes (minutes)"
	@echo "make clean                                remove .venv, caches and reports"
	@echo "Variables:"
	@echo "  CONNECTOR=NAME|MODULE:CLASS   default: $(CONNECTOR)"
	@echo "  JOBS=                         cells, or files of tests, side by side (2); 0: in one process"
	@echo "  VLLM=                         a minor of vLLM, 0.31 to 0.33, or main; 0.33 and main without kernels"
	@echo "  WITH=mooncake|lmcache         what a connector needs; an environment of its own has it"
	@echo "  VENV=$(VENV)                    the virtual environment"
	@echo "  PYTHON=                       the Python to make VENV with"
	@echo "  TORCH_INDEX=                  an index of CPU wheels of torch"

# When this ends with 'Error N', N is pytest's exit code: 1 violation, 10 incomplete, 11 harness.
conform:
	@$(SETUP) cpu accuracy $(WITH)
	@$(VENV)/bin/pytest --kv-connector='$(CONNECTOR)' $(DECLARED) -n $(or $(JOBS),2) $(ARGS)

# tests/helpers/rings.py tells which tests are in a ring.
test: RING = first
test-all: RING = all
test-night: RING = night
test test-all test-night:
	@$(SETUP) cpu accuracy test
	@$(VENV)/bin/pytest -n $(or $(JOBS),2) --dist loadfile --ring $(RING) $(ARGS)

lint:
	@$(SETUP) test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format:
	@$(SETUP) test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs:
	@$(SETUP) docs
	$(VENV)/bin/mkdocs build --strict $(ARGS)

bench:
	@$(SETUP) cpu
	@$(VENV)/bin/python ci/bench.py $(ARGS)

clean:
	rm -rf .venv .venv-* kv-report dist build site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find pytest_kvconform model_matrix tests ci -name __pycache__ -type d -prune -exec rm -rf {} +
