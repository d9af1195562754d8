"""The record must fit into its ConfigMap, which takes 1 MiB, however large the fleet."""

from __future__ import annotations

import json

from sglang_rollout.api.intent import WantedEngine
from sglang_rollout.coordinator.agent_replies import MAX_MESSAGE_CHARACTERS
from sglang_rollout.coordinator.callers.pods import MAX_OWNER_CHARACTERS
from sglang_rollout.coordinator.update.adapters import MAX_ADAPTERS_CHARACTERS, MAX_REASONS_CHARACTERS, ROW_CHARACTERS, rows
from sglang_rollout.coordinator.update.engine import Engine
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import summarize_update
from sglang_rollout.coordinator.update.phases import Update
from sglang_rollout.coordinator.update.process_groups import MAX_GROUPS
from sglang_rollout.coordinator.update.ranks import MAX_GROUP_NAME_CHARACTERS, Group
from sglang_rollout.coordinator.update.tensor_names import TensorNames
from sglang_rollout.coordinator.update.versions import Committed
from sglang_rollout.wire.agent import AgentStatus
from sglang_rollout.wire.arguments import MAX_LABEL_CHARACTERS
from sglang_rollout.wire.reasons import GateReason
from sglang_rollout.wire.record import (
    MAX_RECENT_UPDATES,
    Adapter,
    AdapterRow,
    EndedUpdate,
    EngineChecksums,
    EngineRow,
    GroupRow,
    Record,
    UpdateOutcome,
    UpdateReason,
)
from sglang_rollout.wire.states import EngineState, Version

KIB = 1024
ENGINES = 500
NAMES = [f"a-policy-with-a-long-name-engine-{index}" for index in range(ENGINES)]
BOOT = "0" * 36
"""As long as an engine's boot id, a UUID."""
CHECKSUM = "0" * 64
"""As long as a rank's checksum, a SHA-256."""
STEP = Version(run=3, step=12345, label="step-12345")
NOTE = "x" * MAX_MESSAGE_CHARACTERS
LONGEST_AUTHOR = f"{'n' * 63}/{'o' * MAX_OWNER_CHARACTERS}"
"""As long as a namespace and the longest owner of a pod."""


def group(number: int) -> GroupRow:
    """All engines are in it."""
    return GroupRow(
        name=f"slime-pp_{number}", epoch=99, world_size=4001, master="10.123.234.111:54321", backend="nccl", places=list(range(ENGINES))
    )


def large(**more: object) -> Record:
    """Return a record of engines with long names and messages, and of one group with all engines."""
    why = "The engine holds part of an unfinished weight update: engine 17 did not take the tensors. It waits for a complete one."
    rows = [
        EngineRow(
            name=name,
            state=EngineState.DIRTY,
            version=STEP,
            boot_id=BOOT,
            gate_open=False,
            reason=GateReason.NOT_UP,
            message=why,
        )
        for name in NAMES
    ]
    last = EndedUpdate(version=STEP, outcome=UpdateOutcome.COMMITTED, finished="2026-01-01T00:00:00.000Z", engines=NAMES)
    fields = {"engines": rows, "joined": [group(0)], "last_update": last, "checksums": {8: (CHECKSUM,) * 8}, **more}
    return Record.model_validate({"term": 7, "epoch": 99, "committed": STEP, **fields})


def size(record: Record) -> int:
    return len(record.model_dump_json().encode())


def test_the_record_of_500_engines_fits_a_third_of_a_configmap() -> None:
    adapters = [AdapterRow(name=f"adapter-{n}", path="/adapters/x" * 4, by_spec=True, loaded=500, wanted=500) for n in range(20)]
    found = size(large(adapters=adapters))
    print(f"record of {ENGINES} engines: {found / KIB:.0f} KiB")
    assert found < 300 * KIB


def test_the_largest_record_fits_a_configmap() -> None:
    names = TensorNames(f"model.layers.{number}.weight" for number in range(100_000))
    fleet = Fleet("demo", 7, weights=Committed(version=STEP, names=names))
    fleet.weights.doubt.names.add(f"policy.layers.{number}.weight" for number in range(100_000))
    update = Update({}, 0.0, author=LONGEST_AUTHOR, bytes=2**53, reason=UpdateReason.VERIFICATION_FAILED)
    for _ in range(2 * MAX_RECENT_UPDATES):
        longest = STEP.model_copy(update={"label": "€" * MAX_LABEL_CHARACTERS})
        fleet.transaction.end(summarize_update(fleet, longest, UpdateOutcome.PARTIAL, update, "€" * 1_000_000, engines=NAMES))
    fleet.holder = LONGEST_AUTHOR
    oldest = STEP.model_copy(update={"label": "s" * MAX_LABEL_CHARACTERS})
    for name in NAMES:
        engine = fleet.engines[name.ljust(63, "x")] = Engine(WantedEngine(name=name.ljust(63, "x")), note=NOTE, misses=0)
        engine.status = AgentStatus(
            name=name, boot_id=BOOT, state=EngineState.CLEAN, version=oldest, committed=None, term=7, gate_open=False, reason="x" * 2000
        )
    boots = dict.fromkeys(fleet.engines, BOOT)
    fleet.weights.doubt.engines, fleet.weights.doubt.restarts = boots, set(boots)
    for number in range(MAX_GROUPS):
        fleet.groups[str(number)] = Group("g" * MAX_GROUP_NAME_CHARACTERS, 99, 4001, "h" * 253 + ":54321", "nccl", boots, LONGEST_AUTHOR)
    fleet.adapters.of_trainers = {adapter: Adapter(name=adapter, path="/lora/x", pinned=True) for adapter in map(str, range(640))}
    loaded = fleet.adapters.of_trainers.values()
    assert sum(len(json.dumps([a.name, a.path])) + ROW_CHARACTERS for a in loaded) > 0.99 * MAX_ADAPTERS_CHARACTERS
    fleet.engines[NAMES[0].ljust(63, "x")].adapter_trouble = dict.fromkeys(fleet.adapters.of_trainers, "x" * MAX_MESSAGE_CHARACTERS)
    record = fleet.record()
    assert record is not None
    record = record.model_copy(update={"adapters": rows(fleet, MAX_REASONS_CHARACTERS)})
    found = size(record)
    print(f"largest record: {found / KIB:.0f} KiB")
    assert found < 1000 * KIB
    assert len(record.recent_updates) == MAX_RECENT_UPDATES
    assert [row.name for row in record.members(record.joined[-1])] == list(fleet.engines), "the record has all members of the group"


def test_the_record_of_a_colocated_fleet_fits_a_configmap() -> None:
    found = size(large(engine_checksums={name: EngineChecksums(boot_id=BOOT, checksums=(CHECKSUM,) * 8) for name in NAMES}))
    print(f"record of {ENGINES} engines that keep their weights: {found / KIB:.0f} KiB")
    assert found < 700 * KIB
