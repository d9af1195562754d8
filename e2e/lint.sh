#!/usr/bin/env bash
# The checks of `make lint` that are not Python's: shell scripts, the Helm chart.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t scripts < <(git ls-files -co --exclude-standard | while read -r f; do [ -f "$f" ] && head -c 20 "$f" | grep -qE '^#!.*(ba)?sh' && echo "$f"; done)
if command -v shellcheck > /dev/null; then
  shellcheck "${scripts[@]}"
else
  echo "shellcheck is missing (apt-get install shellcheck)" && exit 1
fi
eval "$(.venv/bin/python -m e2e.cluster env --tools)"
helm lint --quiet --strict --kube-version 1.34.3 charts/sglang-rollout-operator
