"""The weight update as a pure state machine: events in, effects out. No I/O, no clock, no HTTP, no torch."""

from __future__ import annotations

from sglang_rollout.coordinator.update.machine import Machine

__all__ = ["Machine"]
