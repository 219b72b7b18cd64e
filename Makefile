# Everything a person does with this repository, by verb. `make demo` and `make test` work on a fresh machine.

VENV := .venv
BIN := $(VENV)/bin
# The first supported interpreter: `make PYTHON=python3.12 demo` chooses another.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; print("$(name)" if (3, 11) <= sys.version_info[:2] <= (3, 13) else "")' 2>/dev/null)))

CPP = $(shell git ls-files '*.cpp' '*.h')

# Tests in two processes, a file at a time.
SHARED := -n 2 --dist loadscope --no-loadscope-reorder --durations 25

.PHONY: help install demo test test-all test-fast docs lint format types proto proto-check proto-release check bench bench-peers nightly model clean

help:            ## Show this list.
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1|\2/' | column -t -s '|'

install: $(VENV)/.installed  ## Make .venv with everything in it.

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "Holdfast needs Python 3.11, 3.12 or 3.13; none was found. Try: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module. Try: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (minutes on the first run; torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install    ## Start a cluster on this machine, stream four prompts through it, stop it.
	@$(BIN)/holdfast demo

test: install    ## Run the tests, each promise once; what is left out is named at the end.
	@$(BIN)/python -m pytest -m "not slow" $(SHARED)

test-all: install  ## Run every test: every failover on Ray, the soak, full sweeps, searches and combinations as well.
	@$(BIN)/python -m pytest

test-fast: install  ## Run the tests that start neither Ray nor long searches.
	@$(BIN)/python -m pytest -m "not cluster and not slow" $(SHARED)

docs: install    ## Build the documentation as a site with search, in build/site.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

lint: install    ## Check style and formatting.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

format: install  ## Mend style and formatting.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

types: install   ## Check types.
	@$(BIN)/mypy

proto: install   ## Regenerate the protobuf stubs.
	@$(BIN)/python scripts/generate_stubs.py

proto-check: install
	@$(BIN)/python scripts/generate_stubs.py --check
	@$(BIN)/buf lint proto
	@$(BIN)/buf breaking proto --against proto/released.binpb

proto-release: install  ## Keep the public API as it is now: proto-check refuses whatever breaks its clients.
	@$(BIN)/buf build proto --exclude-source-info --path proto/holdfast/v1 -o proto/released.binpb

check: lint types proto-check  ## All that CI checks, but for the tests.

bench: install   ## The batching policies against each other, on this machine.
	@$(BIN)/python -m benchmarks.batching

bench-peers: install  ## Holdfast against vLLM, OpenVINO GenAI, llama.cpp and transformers (benchmarks/peers/README.md).
	@$(BIN)/python -m benchmarks.peers.run --out peers.json

nightly: install ## Every test, ten thousand simulations, fuzzing, others' schemas and suites; PART=3/6 is one part of six.
	@$(BIN)/python -m scripts.nightly $(PART)

model: install   ## Train the bundled models again (minutes).
	@$(BIN)/python -m scripts.train_bundled_model.train

clean:           ## Remove what the other verbs made.
	rm -rf $(VENV) build dist worker/executors/cpu/libraries *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
