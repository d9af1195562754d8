#!/usr/bin/env bash
# `make test`: prepare the machine, run the tests that need no cluster, then the cases on a cluster, then clean up.
# CLUSTER=lab (default) creates a cluster and removes it; current uses your kubectl context; none skips the cluster cases.
# Kubernetes and the images are built in the background during the tests that need neither.
# shellcheck disable=SC2317  # functions are called by the trap and by run
set -euo pipefail
cd "$(dirname "$0")/.."
CLUSTER=${CLUSTER:-lab}
python=.venv/bin/python
out=out/test
mkdir -p "$out"
summary=()
builder=
failed=0

note() { printf '\n[%4d s] %s\n' "$SECONDS" "$1"; }
finish() {
  local status=$?
  trap - EXIT
  if [ -n "$builder" ]; then kill -- "-$builder" 2> /dev/null || true; fi
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
  if "$@"; then
    summary+=("$(printf 'ok     %5d s  %s' $((SECONDS - began)) "$title")")
  else
    summary+=("$(printf 'FAILED %5d s  %s' $((SECONDS - began)) "$title")")
    return 1
  fi
}

tests() { # name, arguments of pytest...
  local name=$1
  shift
  .venv/bin/pytest --strict-skips --durations=30 --junitxml="$out/$name.xml" "$@"
}

build() { # builds Kubernetes and the images; logs to a file, because tests print at the same time
  nice make --no-print-directory cluster-binaries
  if [ "$CLUSTER" = lab ]; then nice make --no-print-directory images; fi
}

await_build() {
  local status=0
  wait "$builder" || status=$?
  builder=
  cat "$out/build.log"
  return "$status"
}

run "Python environment" make --no-print-directory venv
run "check for missing programs" make --no-print-directory preflight
set -m # starts a process group, so that finish can end the whole build
build > "$out/build.log" 2>&1 < /dev/null &
builder=$!
set +m
run "SGLang for CPU" make --no-print-directory engine-venv
run "unit, property, golden and contract tests" tests contract -n 2 --dist loadgroup operator/tests e2e/tests -m "not controlplane" || failed=1
run "wait for the background build of Kubernetes and images" await_build
run "integration tests with an API server" tests integration -n 2 --dist loadgroup operator/tests -m controlplane || failed=1
if [ "$CLUSTER" = none ]; then
  summary+=("SKIPPED         e2e/cases: CLUSTER=none has no cluster")
else
  # Two nodes, one for each pod of a two-pod engine.
  if [ "$CLUSTER" = lab ] && [ "$($python -m e2e.cluster status 2> /dev/null | grep -c ': Ready;')" != 2 ]; then
    $python -m e2e.cluster down # remove the cluster of a crashed run or of the demo
  fi
  run "cluster with the project's images" make --no-print-directory cluster-up NODES=2
  eval "$($python -m e2e.cluster env)"
  run "end-to-end cases" tests cases e2e/cases -m "not neighbours and not two_nodes" || failed=1
fi
exit "$failed"
