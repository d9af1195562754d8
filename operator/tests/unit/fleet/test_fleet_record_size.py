"""The record must fit into its ConfigMap, which takes 1 MiB, however large the fleet."""

from __future__ import annotations

from sglang_rollout.fleet.update.groups import MOST_PLACES
from sglang_rollout.wire.record import AdapterRow, EngineRow, FleetGroup, LastUpdate, Noted, Record, UpdateOutcome
from sglang_rollout.wire.weights import EngineState, Version

KIB = 1024
ENGINES = 500
NAMES = [f"a-policy-with-a-long-name-engine-{index}" for index in range(ENGINES)]
BOOT = "0" * 36
"""As long as an engine's boot id, a UUID."""
CHECKSUM = "0" * 64
"""As long as a rank's checksum, a SHA-256."""
STEP = Version(run=3, n=12345, label="step-12345")


def large(**more: object) -> Record:
    """Every engine has a long name and a reason; one group holds all of them."""
    why = "The engine holds part of an unfinished weight update: engine 17 did not take the tensors. It waits for a complete one."
    rows = [
        EngineRow(name=name, state=EngineState.DIRTY, version=STEP, boot_id=BOOT, gate_open=False, reason=why, all_reduce=123.4)
        for name in NAMES
    ]
    group = FleetGroup(name="slime-pp_0", epoch=99, world_size=4001, master="10.123.234.111:54321", backend="nccl", members=NAMES)
    last = LastUpdate(version=STEP, outcome=UpdateOutcome.COMMITTED, finished="2026-01-01T00:00:00.000Z", engines=NAMES)
    fields = {"engines": rows, "groups": [group], "last_update": last, "checksums": {8: (CHECKSUM,) * 8}, **more}
    return Record.model_validate({"term": 7, "epoch": 99, "committed": STEP, **fields})


def size(record: Record) -> int:
    return len(record.model_dump_json().encode())


def test_five_hundred_engines_take_less_than_a_third_of_what_the_configmap_may_hold() -> None:
    adapters = [AdapterRow(name=f"adapter-{n}", path="/adapters/x" * 4, by_spec=True, loaded=500, wanted=500) for n in range(20)]
    found = size(large(adapters=adapters))
    print(f"record of {ENGINES} engines: {found / KIB:.0f} KiB")
    assert found < 300 * KIB


def test_a_fleet_that_keeps_its_weights_notes_checksums_of_eight_ranks_for_each_engine() -> None:
    found = size(large(noted={name: Noted(boot_id=BOOT, checksums=(CHECKSUM,) * 8) for name in NAMES}))
    print(f"record of {ENGINES} engines that keep their weights: {found / KIB:.0f} KiB")
    assert found < 700 * KIB


def test_as_many_groups_as_may_be_open_fit() -> None:
    many = [
        FleetGroup(name=f"slime-pp_{n}", epoch=99, world_size=4001, master="10.123.234.111:54321", backend="nccl", members=NAMES)
        for n in range(MOST_PLACES // ENGINES)
    ]
    found = size(large(groups=many))
    print(f"record of {ENGINES} engines in {len(many)} groups: {found / KIB:.0f} KiB")
    assert found < 700 * KIB
