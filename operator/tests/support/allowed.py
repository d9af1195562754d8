"""Limits for tests about other things."""

from __future__ import annotations

from sglang_rollout.controller.decide.allowed import Allowed

ANYTHING = Allowed(host_paths=("/",), service_accounts=("mine",), host_network=True, host_ipc=True, privileged=True)
