#!/usr/bin/env bash
# `make test`: prepare the machine, run the tests that need no cluster, then the cases on a cluster, then clean up.
# CLUSTER=lab (default) makes a cluster and removes it; current uses your kubectl context; none leaves the cases out, by name.
set -euo pipefail
cd "$(dirname "$0")/.."
CLUSTER=${CLUSTER:-lab}
python=.venv/bin/python
summary=()

note() { printf '\n[%4d s] %s\n' "$SECONDS" "$1"; }
# shellcheck disable=SC2317  # called by the trap
finish() {
  local status=$?
  trap - EXIT
  if [ "$CLUSTER" = lab ] && [ -e .venv/.done ]; then
    note "remove the lab cluster"
    $python -m e2e.cluster down || status=1
  fi
  printf '\nSummary after %d s, CLUSTER=%s:\n' "$SECONDS" "$CLUSTER"
  printf '  %s\n' "${summary[@]:-nothing ran}"
  exit "$status"
}
trap finish EXIT

run() { # title, command...
  local title=$1 began=$SECONDS
  shift
  note "$title"
  if "$@"; then summary+=("ok      $((SECONDS - began)) s  $title"); else summary+=("FAILED  $((SECONDS - began)) s  $title"); return 1; fi
}

run "Python environment" make --no-print-directory venv
run "what is missing on this machine" make --no-print-directory preflight
run "Kubernetes binaries" make --no-print-directory cluster-binaries
run "SGLang for CPU" make --no-print-directory engine-venv
failed=0
run "unit, property, golden, contract and integration tests" .venv/bin/pytest operator/tests e2e/tests || failed=1
if [ "$CLUSTER" = none ]; then
  summary+=("SKIPPED e2e/cases: CLUSTER=none has no cluster")
else
  # Two nodes: an engine of two pods has one for each.
  if [ "$CLUSTER" = lab ] && [ "$($python -m e2e.cluster status 2> /dev/null | grep -c ': Ready;')" != 2 ]; then
    $python -m e2e.cluster down # what a crashed run or the demo left would be in the way
  fi
  run "cluster with the project's images" make --no-print-directory cluster-up NODES=2
  eval "$($python -m e2e.cluster env)"
  run "end-to-end cases" .venv/bin/pytest e2e/cases -m "not neighbours and not two_nodes" || failed=1
fi
exit "$failed"
