# Everything here works from a clean checkout and may be run again at any time.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
VLLM_PYTHON ?= $(PYTHON)
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-all test-vllm chaos lint types docs clean
.PHONY: bench-episodes bench-store bench-exports bench-engine bench-engines bench-asynchrony bench-outage bench-tokens

demo: $(VENV)/.demo  ## a small model works through tool-using episodes; everything embedded
	@$(BIN)/atropos demo $(ARGS)

test: $(VENV)/.test  ## every test but the slow ones
	$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.test  ## every test; the slow ones are mostly cells of the fault bench
	$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

test-vllm: $(VENV)/.test $(VLLM_VENV)/.complete  ## the tests that need a real vLLM, on the CPU; it gets a virtual environment of its own
	ATROPOS_TEST_VLLM=required $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

chaos: $(VENV)/.test  ## CELL=component/moment SEED=n plays one cell of the fault bench, CELL=all every one; else they are listed
	@$(BIN)/python -m atropos.tests.chaos --cell "$(CELL)" --seed $(or $(SEED),0)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	@mkdir -p .types && ln -sfn .. .types/atropos  # the checkout may have any name; the package is `atropos`
	MYPYPATH=.types $(BIN)/mypy

docs: $(VENV)/.test  ## write the pages that are made from code, and the site, to build/site
	$(BIN)/python -m atropos.cli.reference
	$(BIN)/python -m atropos.cli.schema
	$(BIN)/mkdocs build --strict

bench-episodes: $(VENV)/.test  ## what durability costs, as ratios; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.episodes $(ARGS)

bench-asynchrony: $(VENV)/.test  ## what it is worth that rollouts go on while the trainer works; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.asynchrony $(ARGS)

bench-outage: $(VENV)/.test  ## the engine away for a minute under load; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.outage $(ARGS)

bench-store: $(VENV)/.test  ## what the store costs and holds, beside bare COPY; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.store $(ARGS)

bench-tokens: $(VENV)/.test  ## packed tokens against native arrays of Postgres; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.token_storage $(ARGS)

bench-exports: $(VENV)/.test  ## exports beside a bare COPY, as a ratio, and their memory; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.exports $(ARGS)

bench-engines: $(VENV)/.test  ## places filled, stalls of a reload, power of its proof; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.engines $(ARGS)

bench-engine: $(VENV)/.test  ## batching of the dev engine, as a ratio; ends in one JSON line
	$(BIN)/python -m atropos.benchmarks.engine $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Atropos needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing (the first time takes a few minutes) …"
	$(PIP) $(TORCH) -e ".[demo]"
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	@echo "Installing (the first time takes a few minutes) …"
	$(PIP) $(TORCH) -e ".[test]"
	@touch $@ $(VENV)/.demo

# What vLLM pulls in beside torch does not match a CPU's torch, and breaks its own imports: away with it.
$(VLLM_VENV)/.complete: tests/vllm/requirements.txt
	@$(VLLM_PYTHON) -c 'import sys; fits = sys.platform == "linux" and (3, 11) <= sys.version_info[:2] < (3, 15); sys.exit(0 if fits else "vLLM for a CPU needs Linux and Python 3.11 to 3.14; where that has another name than python3, set VLLM_PYTHON")'
	@echo "Installing vLLM for a CPU: 3.5 GB, some minutes …"
	@rm -rf $(VLLM_VENV)
	@$(VLLM_PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install $(TORCH) -r $< || { echo "vLLM for a CPU cannot be had here: pip did not install $$(cat $<) with the CPU build of $(TORCH); where that build is missing, add TORCH='torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu'" >&2; exit 1; }
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

clean:  ## remove the virtual environments and caches; .atropos (your data) stays
	rm -rf $(VENV) $(VLLM_VENV) .types .mypy_cache .ruff_cache .pytest_cache build *.egg-info
