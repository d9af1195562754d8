#!/usr/bin/env bash
# `make demo`: create a fleet and update its weights from a trainer.
# CLUSTER=lab (default) creates a cluster, current uses your kubectl context, none runs plain processes without root.
set -euo pipefail
cd "$(dirname "$0")/.."
export CLUSTER=${CLUSTER:-lab} PYTHONPATH=$PWD
# The sizes of the files that requirements/*.lock, Go's modules and the base image name, and the time of a first run with empty caches.
if [ "$CLUSTER" = none ]; then
  first="downloads about 3.0 GB of Python packages, and what apt-get installs"
else
  first="downloads about 3.4 GB: 3.2 GB of Python packages, 0.14 GB of Go modules, 0.05 GB for the base image, and what apt-get installs.
It takes about 18 minutes on two cores, and later runs take 2 to 4 minutes"
fi
if [ "$CLUSTER" = current ]; then first="that builds the images downloads about 3.2 GB of Python packages, and a base image"; fi
printf 'A first run %s.\n' "$first" >&2
part() { printf '\n[%d/%d, %d s] %s\n' "$1" "$parts" "$SECONDS" "$2" >&2; }
parts=4
if [ "$CLUSTER" = none ]; then parts=3; fi
part 1 "Python environment and programs of this machine"
make --no-print-directory venv
.venv/bin/python -m e2e.cluster preflight
if [ "$CLUSTER" = none ]; then
  part 2 "SGLang for CPU (the first time 2.9 GB from PyPI)"
  make --no-print-directory engine-venv > /dev/null
  part 3 "the fleet and its trainer"
  exec .venv/bin/python -m e2e.demo_local
fi
if [ "$CLUSTER" = lab ]; then
  part 2 "Kubernetes (the first time built from source, for minutes)"
  make --no-print-directory cluster-binaries
else
  part 2 "the cluster of your kubectl context"
fi
part 3 "cluster and images (the first time built, for minutes, with 2.9 GB from PyPI)"
make --no-print-directory cluster-up > /dev/null
eval "$(.venv/bin/python -m e2e.cluster env)"
part 4 "operator, fleet and trainer"
exec .venv/bin/python -m e2e.demo
