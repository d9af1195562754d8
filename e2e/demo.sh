#!/usr/bin/env bash
# `make demo`: create a fleet and update its weights from a trainer.
# CLUSTER=lab (default) creates a cluster, current uses your kubectl context, none runs plain processes without root.
set -euo pipefail
cd "$(dirname "$0")/.."
export CLUSTER=${CLUSTER:-lab} PYTHONPATH=$PWD
part() { printf '\n[%d/%d, %d s] %s\n' "$1" "$parts" "$SECONDS" "$2" >&2; }
parts=4
if [ "$CLUSTER" = none ]; then parts=3; fi
part 1 "Python environment and programs of this machine"
make --no-print-directory venv
.venv/bin/python -m e2e.cluster preflight
if [ "$CLUSTER" = none ]; then
  part 2 "SGLang for CPU (the first time 2.6 GB from PyPI)"
  make --no-print-directory engine-venv > /dev/null
  part 3 "the fleet and its trainer"
  exec .venv/bin/python -m e2e.demo_local
fi
part 2 "Kubernetes (the first time built from source, for minutes)"
if [ "$CLUSTER" = lab ]; then make --no-print-directory cluster-binaries; fi
part 3 "cluster and images (the first time built, for minutes, with 2.6 GB from PyPI)"
make --no-print-directory cluster-up > /dev/null
eval "$(.venv/bin/python -m e2e.cluster env)"
part 4 "operator, fleet and trainer"
exec .venv/bin/python -m e2e.demo
