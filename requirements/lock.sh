#!/usr/bin/env bash
# Resolve every requirements/*.lock again: exact versions with hashes, no index addresses.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=(python3 -m uv)
for candidate in "uv" ".venv/bin/uv"; do
  if command -v "$candidate" > /dev/null; then uv=("$candidate"); break; fi
done
compile=("${uv[@]}" pip compile --quiet --generate-hashes --no-emit-index-url --no-header --no-annotate)
# The images' platforms; the development environment works on every platform and Python that we support.
image=(--python-version 3.13 --python-platform x86_64-manylinux_2_34)
engine=(--python-version 3.11 --python-platform x86_64-manylinux_2_34)

for extra in operator coordinator; do
  "${compile[@]}" "${image[@]}" pyproject.toml --extra "$extra" -o "requirements/$extra.lock"
done
"${compile[@]}" "${image[@]}" pyproject.toml requirements/router.in --extra router -o requirements/router.lock
"${compile[@]}" "${image[@]}" requirements/uv.in -o requirements/uv.lock
"${compile[@]}" "${engine[@]}" requirements/engine-torch.in -o requirements/engine-torch.lock
"${compile[@]}" "${engine[@]}" requirements/engine-cpu.in -c requirements/engine-torch.lock -o requirements/engine-cpu.lock
"${compile[@]}" "${engine[@]}" --no-deps requirements/engine-cpu-nodeps.in >> requirements/engine-cpu.lock
"${compile[@]}" "${engine[@]}" --no-deps requirements/engine-old.in -o requirements/engine-old.lock
# The development group names the project itself, so the project is given as a folder and left out of the result.
echo "-e .[operator,preview,coordinator,trainer,router]" | "${compile[@]}" --universal --python-version 3.11 - --group pyproject.toml:dev \
  --no-emit-package sglang-rollout -o requirements/dev.lock
# Reference pages are made from the code, so the documentation needs the libraries of every part.
"${compile[@]}" --universal --python-version 3.11 pyproject.toml requirements/docs.in --extra operator --extra preview --extra coordinator --extra trainer \
  --extra testing -c requirements/dev.lock -o requirements/docs.lock
