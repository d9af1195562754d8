#!/usr/bin/env bash
# The shell script checks of `make lint`. The Helm chart is linted by operator/tests/integration/test_chart.py.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t scripts < <(git ls-files -co --exclude-standard | while read -r f; do [ -f "$f" ] && head -c 20 "$f" | grep -qE '^#!.*(ba)?sh' && echo "$f"; done)
if command -v shellcheck > /dev/null; then
  shellcheck "${scripts[@]}"
else
  echo "shellcheck is missing (apt-get install shellcheck)" && exit 1
fi
