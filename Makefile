# sglang-rollout: `make help` lists the targets. CLUSTER=lab (default: a cluster on this machine, needs Linux and root), current (your kubectl context) or none (plain processes).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SHELLFLAGS := -euo pipefail -c
CLUSTER ?= lab
PYTHON ?= python3
NODES ?= 1
KIND_CLUSTER ?= kind
SEED ?= 1
MINUTES ?= 10
KIND ?= plain
VENV := .venv
BIN := $(VENV)/bin
DOCS_VENV := .build/docs-venv
export PYTHONPATH := $(CURDIR)
export CLUSTER
LAB := $(BIN)/python -m e2e.cluster

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "CLUSTER=lab|current|none: where demo and test run (now: $(CLUSTER))"

# --- development environment -------------------------------------------------------------------------------------------
$(VENV)/.done: requirements/dev.lock pyproject.toml
	@echo "Python environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -q uv==0.13.8
	@$(BIN)/uv pip install -q -p $(VENV) --require-hashes -r requirements/dev.lock
	@$(BIN)/uv pip install -q -p $(VENV) --no-deps -e .
	@touch $@

.PHONY: venv engine-venv cluster-binaries preflight
venv: $(VENV)/.done ## The project's Python environment, from requirements/dev.lock
preflight: venv ## Check this machine for missing programs; as root on Debian, install them
	@$(BIN)/python -m e2e.cluster preflight
engine-venv: venv ## A real SGLang for CPU, in its own environment (cached)
	@$(BIN)/python -m e2e.engine prepare
cluster-binaries: venv ## Build Kubernetes, etcd, CoreDNS and Helm (cached)
	@$(LAB) binaries

# --- checks ------------------------------------------------------------------------------------------------------------
.PHONY: lint generate golden lock test test-all test-fast test-long test-newest test-neighbours chaos chaos-real chaos-cluster fuzz bench
lint: venv ## ruff, mypy, import-linter, spelling, words, shellcheck, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports | tail -n 1
	@git ls-files -z | xargs -0 $(BIN)/codespell
	@$(BIN)/python -m e2e.check_words
	@$(BIN)/python -m sglang_rollout.api.crdgen --check
	@$(BIN)/python charts/generate.py --check
	@e2e/lint.sh

generate: venv ## Write the CRD, its reference, and the chart's README and values schema
	@$(BIN)/python -m sglang_rollout.api.crdgen
	@$(BIN)/python charts/generate.py

golden: venv ## Write the golden files again; read their diff
	@UPDATE_GOLDEN=1 $(BIN)/pytest -q operator/tests/golden operator/tests/unit/proxy/test_config.py -k golden

lock: venv ## Resolve requirements/*.lock again
	@requirements/lock.sh

test-fast: venv ## Unit, property and golden tests: no root, no cluster, no engine
	@$(BIN)/pytest -q -n auto --dist worksteal operator/tests/properties e2e/tests operator/tests/unit operator/tests/golden -m "not engine and not router and not controlplane and not cluster"

test: ## All tests on a cluster made for them (CLUSTER=current: on yours)
	@e2e/test.sh

test-all: ## make test, then test-long, test-newest, test-neighbours and the fault matrices
	@e2e/test.sh
	@$(MAKE) --no-print-directory test-long test-newest test-neighbours chaos chaos-real chaos-cluster

test-long: venv engine-venv ## Tests that need minutes on a busy machine, most with a real SGLang (3 minutes)
	@$(BIN)/pytest -q operator/tests e2e/tests -m long

test-newest: export KUBERNETES_VERSION := 1.37
test-newest: venv ## Integration tests with the newest Kubernetes and Helm 4 (first build: 15 minutes)
	@$(LAB) binaries > /dev/null
	@$(BIN)/pytest -q -n 2 --dist loadgroup operator/tests -m controlplane

test-neighbours: venv ## Cases with Kueue and with enforced NetworkPolicies, on the lab cluster (first build: 9 minutes)
	@$(BIN)/python -m e2e.neighbours.kueue
	@$(BIN)/python -m e2e.neighbours.policy_agent
	@CLUSTER=lab $(MAKE) --no-print-directory cluster-up > /dev/null
	@trap '$(LAB) down' EXIT; eval "$$($(LAB) env)"; $(BIN)/pytest -q e2e/cases -m neighbours

chaos: venv engine-venv ## Fault matrix: kill each process in each phase of an update (40 minutes)
	@$(BIN)/python -m e2e.chaos --out out/chaos.json
	@$(BIN)/python -m e2e.chaos --transport staged --out out/chaos-staged.json

chaos-real: venv engine-venv ## Fault matrix with two real SGLang engines on the CPU (40 minutes)
	@$(BIN)/python -m e2e.chaos --real --out out/chaos-real.json
	@$(BIN)/python -m e2e.chaos --real --transport staged --out out/chaos-real-staged.json

chaos-cluster: venv engine-venv ## Fault matrix of API server, node and link, and cases for two nodes (15 minutes)
	@$(LAB) up --nodes 2
	@$(BIN)/python -m e2e.images build | $(LAB) load
	@eval "$$($(LAB) env)"; $(BIN)/python -m e2e.chaos --cluster --out out/chaos-cluster.json
	@eval "$$($(LAB) env)"; $(BIN)/pytest -q e2e/cases -m two_nodes

fuzz: venv engine-venv ## Hostile requests against a real SGLang engine (SEED=1 MINUTES=10 KIND=plain, lora or reward)
	@$(BIN)/python -m e2e.fuzz --seed $(SEED) --minutes $(MINUTES) --kind $(KIND)

bench: venv engine-venv ## Benchmarks against a baseline of the same run; results: bench/results
	@for b in reconcile plans push staged catchup endurance inflight latency batches callers floods memory; do $(BIN)/python -m bench.$$b; done

# --- documentation ------------------------------------------------------------------------------------------------------
$(DOCS_VENV)/.done: requirements/docs.lock
	@echo "Python environment of the documentation in $(DOCS_VENV)"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -q uv==0.13.8
	@$(DOCS_VENV)/bin/uv pip install -q -p $(DOCS_VENV) --require-hashes -r requirements/docs.lock
	@touch $@

.PHONY: docs
docs: $(DOCS_VENV)/.done ## Build the documentation in docs/_build; a warning or a broken link is an error
	@PYTHONPATH=operator:. $(DOCS_VENV)/bin/python docs/generate.py
	@PYTHONPATH=operator $(DOCS_VENV)/bin/sphinx-build -q -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

# --- cluster and demo --------------------------------------------------------------------------------------------------
.PHONY: cluster-up cluster-status cluster-down images push kind-load demo clean
cluster-up: venv ## Start a Kubernetes cluster with the project's images
	@$(LAB) up --nodes $(NODES)
	@if [ $(CLUSTER) = lab ]; then $(BIN)/python -m e2e.images build | $(LAB) load; fi
	@$(LAB) env
cluster-status: venv ## Show the processes of the lab cluster
	@$(LAB) status
cluster-down: venv ## Remove the lab cluster
	@$(LAB) down
images: venv ## Build the images with docker or buildah (cached)
	@$(BIN)/python -m e2e.images build
push: venv ## Push the images and the chart to a registry, and print how to install them (REGISTRY=registry.example.org/rollout)
	@$(BIN)/python -m e2e.images push $(REGISTRY)
kind-load: venv ## Build the images and load them into a kind cluster (KIND_CLUSTER)
	@command -v kind > /dev/null || { echo "kind is not on PATH: https://kind.sigs.k8s.io"; exit 1; }
	@CLUSTER=none $(BIN)/python -m e2e.images build | while read -r _ archive _; do kind load image-archive --name $(KIND_CLUSTER) "$$archive"; done
demo: ## Start a fleet and a trainer that updates its weights
	@e2e/demo.sh
clean: ## Stop and remove what demo and test created; caches stay
	@if [ -e $(VENV)/.done ]; then $(LAB) down --data; fi
	@rm -rf out .build
