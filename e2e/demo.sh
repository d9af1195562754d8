#!/usr/bin/env bash
# `make demo`: create a fleet and update its weights from a trainer.
# CLUSTER=lab (default) creates a cluster, current uses your kubectl context, none runs plain processes without root.
set -euo pipefail
cd "$(dirname "$0")/.."
export CLUSTER=${CLUSTER:-lab} PYTHONPATH=$PWD
make --no-print-directory venv
.venv/bin/python -m e2e.cluster preflight
if [ "$CLUSTER" = none ]; then
  make --no-print-directory engine-venv > /dev/null
  exec .venv/bin/python -m e2e.demo_local
fi
make --no-print-directory cluster-up > /dev/null
eval "$(.venv/bin/python -m e2e.cluster env)"
exec .venv/bin/python -m e2e.demo
