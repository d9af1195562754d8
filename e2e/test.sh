#!/usr/bin/env bash
# `make test`: prepare the machine, run all tests, then clean up.
# The end-to-end cases take longest and wait for most of their time. So the cluster is created first, and all other tests run beside the
# cases. The output of the cases goes to out/test/cases.log and is printed at the end.
# CLUSTER=lab (default) creates a cluster and removes it; current uses your kubectl context; none skips the end-to-end cases.
# shellcheck disable=SC2317  # functions are called by the trap and by run
set -euo pipefail
cd "$(dirname "$0")/.."
CLUSTER=${CLUSTER:-lab}
python=.venv/bin/python
out=out/test
mkdir -p "$out"
rm -f "$out/summary"
cases=

note() { printf '\n[%4d s] %s\n' "$SECONDS" "$1"; }
finish() {
  local status=$?
  trap - EXIT
  if [ -n "$cases" ]; then kill -- "-$cases" 2> /dev/null || true; fi
  if [ "$CLUSTER" = lab ] && [ -e .venv/.done ]; then
    note "remove the lab cluster"
    $python -m e2e.cluster down || status=1
  fi
  printf '\nSummary after %d s, CLUSTER=%s:\n' "$SECONDS" "$CLUSTER"
  cat "$out/summary" 2> /dev/null || echo "  nothing ran"
  exit "$status"
}
trap finish EXIT

run() { # title, command...
  local title=$1 began=$SECONDS result=ok status=0
  shift
  note "$title"
  "$@" || { status=1 result=FAILED; }
  printf '  %-7s %5d s  %s\n' "$result" $((SECONDS - began)) "$title" >> "$out/summary"
  return "$status"
}

tests() { # name, arguments of pytest...
  local name=$1
  shift
  .venv/bin/pytest --strict-skips --durations=30 --junitxml="$out/$name.xml" "$@"
}

create_cluster() { # two nodes, one for each pod of a two-pod engine
  if [ "$CLUSTER" = lab ] && [ "$($python -m e2e.cluster status 2> /dev/null | grep -c ': Ready;')" != 2 ]; then
    $python -m e2e.cluster down # remove the cluster of a crashed run or of the demo
  fi
  make --no-print-directory cluster-up NODES=2
}

start_cases() {
  note "end-to-end cases in the background, see $out/cases.log"
  set -m # starts a process group, so that finish can end it
  (
    trap - EXIT
    eval "$($python -m e2e.cluster env)"
    run "end-to-end cases" tests cases e2e/cases -m "not neighbours and not two_nodes"
  ) > "$out/cases.log" 2>&1 < /dev/null &
  cases=$!
  set +m
}

await_cases() {
  local status=0
  wait "$cases" || status=$?
  cases=
  cat "$out/cases.log"
  return "$status"
}

failed=0
run "Python environment" make --no-print-directory venv
run "check for missing programs" make --no-print-directory preflight
run "SGLang for CPU" make --no-print-directory engine-venv
run "Kubernetes" make --no-print-directory cluster-binaries
if [ "$CLUSTER" = none ]; then
  printf '  SKIPPED          end-to-end cases: CLUSTER=none has no cluster\n' >> "$out/summary"
else
  if [ "$CLUSTER" = lab ]; then run "images" make --no-print-directory images; fi
  run "cluster with the project's images" create_cluster
  start_cases
fi
run "unit, property, golden and contract tests" tests contract -n 2 --dist loadgroup operator/tests e2e/tests -m "not controlplane and not long" || failed=1
run "integration tests with an API server" tests integration -n 2 --dist loadgroup operator/tests -m controlplane || failed=1
if [ -n "$cases" ]; then run "wait for the end-to-end cases" await_cases || failed=1; fi
exit "$failed"
