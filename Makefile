# sglang-rollout: `make help` lists the targets. CLUSTER=lab (default: made here, needs Linux and root), current (your kubectl context), none (plain processes).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SHELLFLAGS := -euo pipefail -c
CLUSTER ?= lab
PYTHON ?= python3
NODES ?= 1
VENV := .venv
BIN := $(VENV)/bin
export PYTHONPATH := $(CURDIR)
export CLUSTER
LAB := $(BIN)/python -m e2e.cluster

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  CLUSTER=lab|current|none says where demo and test run (now: $(CLUSTER))"

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
venv: $(VENV)/.done ## The project's own Python environment, from the lock
preflight: venv ## Look for what is missing on this machine and, as root on Debian, install it
	@$(BIN)/python -m e2e.cluster preflight
engine-venv: venv ## A real SGLang for CPU in an environment of its own (cached by content)
	@$(BIN)/python -m e2e.engine prepare
cluster-binaries: venv ## Kubernetes, etcd, CoreDNS and Helm, built from Go modules (cached by content)
	@$(LAB) binaries

# --- checks ------------------------------------------------------------------------------------------------------------
.PHONY: lint generate golden lock test test-all test-fast test-neighbours chaos chaos-real chaos-cluster bench
lint: venv ## ruff, mypy, import-linter, shellcheck, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports | tail -n 1
	@$(BIN)/python -m sglang_rollout.api.crdgen --check
	@$(BIN)/python charts/generate.py --check
	@e2e/lint.sh

generate: venv ## Write everything that is generated: CRD, CR reference, chart README and values schema
	@$(BIN)/python -m sglang_rollout.api.crdgen
	@$(BIN)/python charts/generate.py

golden: venv ## Write the golden files anew (rendered objects, haproxy's configuration); read the diff
	@UPDATE_GOLDEN=1 $(BIN)/pytest -q operator/tests/golden operator/tests/unit/proxy/test_config.py -k golden

lock: venv ## Resolve requirements/*.lock anew
	@requirements/lock.sh

test-fast: venv ## Unit, property and golden tests: no root, no cluster, no engine
	@$(BIN)/pytest -q -n auto operator/tests/unit operator/tests/golden operator/tests/properties e2e/tests -m "not engine and not router and not controlplane and not cluster"

test: ## All tests, on a cluster made for them (CLUSTER=current: on yours)
	@e2e/test.sh

test-all: ## make test, then what takes too long for each change: Kueue and the fault matrices
	@e2e/test.sh
	@$(MAKE) --no-print-directory test-neighbours chaos chaos-real chaos-cluster

test-neighbours: venv ## The cases with Kueue, built from its Go module (5 minutes once), on the lab cluster
	@$(BIN)/python -m e2e.neighbours.kueue
	@CLUSTER=lab $(MAKE) --no-print-directory cluster-up > /dev/null
	@trap '$(LAB) down' EXIT; eval "$$($(LAB) env)"; $(BIN)/pytest -q e2e/cases -m neighbours

chaos: venv engine-venv ## The fault matrix: every part killed or stopped in every phase of an update (about 20 minutes)
	@$(BIN)/python -m e2e.chaos --out out/chaos.json

chaos-real: venv engine-venv ## The fault matrix with two real SGLang engines on the CPU (about 45 minutes on busy cores)
	@$(BIN)/python -m e2e.chaos --real --out out/chaos-real.json

chaos-cluster: venv engine-venv ## What only a cluster can lose: API server, node, link; on a lab of two nodes (about 15 minutes)
	@$(LAB) up --nodes 2
	@$(BIN)/python -m e2e.images build | $(LAB) load
	@eval "$$($(LAB) env)"; $(BIN)/python -m e2e.chaos --cluster --out out/chaos-cluster.json
	@eval "$$($(LAB) env)"; $(BIN)/pytest -q e2e/cases/test_avoiding.py

bench: venv engine-venv ## Benchmarks: ratios against a baseline in the same run, results in bench/results
	@for b in reconcile plans push catchup endurance inflight latency; do $(BIN)/python -m bench.$$b; done

# --- cluster and demo --------------------------------------------------------------------------------------------------
.PHONY: cluster-up cluster-status cluster-down images demo clean
cluster-up: venv ## A real Kubernetes on this machine, with the project's images loaded
	@$(LAB) up --nodes $(NODES)
	@if [ $(CLUSTER) = lab ]; then $(BIN)/python -m e2e.images build | $(LAB) load; fi
	@$(LAB) env
cluster-status: venv ## What of the lab cluster runs
	@$(LAB) status
cluster-down: venv ## Remove the lab cluster: processes, namespaces, bridge, mounts, cgroups
	@$(LAB) down
images: venv ## Build the images (docker or buildah; cached by content)
	@$(BIN)/python -m e2e.images build
demo: ## From nothing to a running fleet whose trainer updates weights
	@e2e/demo.sh
clean: ## Stop and remove what demo and test made on this machine; caches stay
	@if [ -e $(VENV)/.done ]; then $(LAB) down --data; fi
	@rm -rf out .build
