# The words are all you need: demo, test, check, bench, docs, serve. Each installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0
OUT ?=
FRESH ?=
REWARD ?=
NAME ?=
# Processes that run tests side by side; each has servers of its own.
# Two more than there are cores: many tests wait for servers, browsers and time limits.
JOBS ?= $(shell echo $$(($$(env -u OMP_NUM_THREADS nproc) + 2)))
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal
export OMP_NUM_THREADS ?= 1
# Some images set it. Then each process that a test starts would compile what it imports once more.
unexport PYTHONDONTWRITEBYTECODE


.PHONY: help install demo test test-vllm test-launch soak test-fast check format bench bench-gpu docs serve wheel audit clean

help:  ## show the words
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

install: $(VENV)/.installed  ## make the virtual environment with everything in it

# torch first, and pinned: a looser range would fetch gigabytes of CUDA packages on a CPU box.
$(VENV)/.demo-installed: pyproject.toml requirements/torch-cpu.txt requirements/install_torch.py requirements/uv_install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'uv>=0.13,<0.14'
	$(BIN)/python requirements/install_torch.py
	$(BIN)/python requirements/uv_install.py -e '.[local,examples]'
	touch $@

$(VENV)/.installed: $(VENV)/.demo-installed
	$(BIN)/python requirements/uv_install.py --group dev -e '.[local,four-bits,examples]'
	touch $@

# Stopped and run again, it goes on; FRESH=1 begins anew.
demo: $(VENV)/.demo-installed  ## train an agent on this machine: NAME=tic-tac-toe SEED=0 CONTROL= FRESH= OUT=; the e-mail agent, which needs no NAME, also has REWARD=answer|ruler JUDGE=scripted REVIEW=scripted
	$(BIN)/langchain-art demo $(NAME) --seed $(SEED) $(if $(OUT),--out $(OUT)) \
		$(if $(CONTROL),--control) $(if $(REVIEW),--review $(REVIEW)) \
		$(if $(REWARD),--reward $(REWARD)) $(if $(JUDGE),--judge $(JUDGE)) $(if $(FRESH),--fresh)

test: install  ## a slice of each kind of test, but those that need vLLM or SkyPilot
	$(PYTEST) -m 'not vllm and not skypilot'

# Tests of one server are a group: another process would start the server once more.
test-vllm: install  ## the tests that need vLLM, whose CPU build they install for themselves
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup --no-loadscope-reorder -m vllm

test-launch: install  ## the tests that need SkyPilot, which they install for themselves (330 MB)
	$(BIN)/python -m pytest -m skypilot tests/integration_tests/launch

soak: install  ## the whole of what the tests of endurance show a part of, reported in docs/soak.md; hours. ART_SOAK=0.1: a tenth of it
	ART_SOAK=$(or $(ART_SOAK),1) $(BIN)/python -m pytest -p tests.support.soak_report -m soak

test-fast: install  ## all but the slow tests
	$(PYTEST) -m 'not slow and not vllm and not skypilot'

check: install node_modules/.installed  ## lint, formatting, types of Python and of the page, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright & first=$$!; $(BIN)/pyright -p benchmarks; second=$$?; wait $$first && exit $$second
	$(BIN)/lint-imports
	$(BIN)/node node_modules/typescript/bin/tsc

# The page is served as it is written: nothing is built, its types are checked.
node_modules/.installed: package.json $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/npm install --no-package-lock --no-audit --no-fund --silent
	touch $@

format: install  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## all benchmarks, or one: NAME=loop
	$(BIN)/python -m benchmarks $(NAME)

bench-gpu: install  ## a report on this machine's GPU, to paste into an issue: MODEL=qwen3-8b; SMALL=1 works on a CPU
	$(BIN)/python -m benchmarks.gpu $(if $(SMALL),--small) $(if $(MODEL),--model $(MODEL))

docs: $(VENV)/.docs-installed  ## build the documentation into out/site; a broken link or an undocumented name fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/python requirements/uv_install.py --group docs
	touch $@

wheel: install  ## build the wheel into dist/, and bills of materials of it and of each lock
	$(BIN)/python requirements/sbom.py
	$(BIN)/uv build --wheel --out-dir dist
	for lock in local gpu build; do $(BIN)/python requirements/sbom.py $$lock dist/$$lock.cdx.json || exit 1; done
	cp requirements/langchain-art.cdx.json dist/

# Nothing is resolved: what is asked about are the releases and hashes of the lock. --strict: a
# release that the database does not know, or a database that does not answer, is a failure.
audit: install  ## ask PyPI for advisories on the locked releases: LOCK=gpu, SERVICE=osv; needs the Internet
	$(BIN)/python requirements/uv_install.py --group audit
	$(BIN)/pip-audit --strict --disable-pip --require-hashes -s $(or $(SERVICE),pypi) -r requirements/$(or $(LOCK),local).txt

serve: install  ## serve a model: MODEL=Qwen/Qwen2.5-0.5B-Instruct POLICY=my-agent
	$(BIN)/langchain-art serve $(MODEL) $(if $(POLICY),--policy $(POLICY))

clean:  ## remove what was made here
	rm -rf $(VENV) node_modules out dist .pytest_cache .ruff_cache .hypothesis
