import pytest

from sglang_rollout.batches.routes import routes as data_routes
from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.coordinator.http.info import routes as info_routes
from sglang_rollout.wire.access import PathKind, kind_of_path
from sglang_rollout.wire.ports import FLEET, FLEET_CALLER, FLEET_SERVING, FLEET_TENSORS


def test_every_control_route_is_a_control_path() -> None:
    assert {kind_of_path(route.path) for route in control_routes} == {PathKind.CONTROL}


def test_every_data_route_is_a_data_path() -> None:
    assert {kind_of_path(route.path) for route in data_routes} == {PathKind.DATA}


def test_reads_that_show_weights_engines_or_addresses_are_control_paths() -> None:
    shown = {route.path for route in info_routes if kind_of_path(route.path) is PathKind.CONTROL}
    assert shown == {FLEET, FLEET_CALLER, FLEET_SERVING, FLEET_TENSORS, "/get_weights_by_name", "/workers", "/list_workers"}


@pytest.mark.parametrize("path", ["/generate/", "/GENERATE", "//health", "/unknown", "", "/v1/modelsx"])
def test_a_path_that_is_not_listed_is_a_control_path(path: str) -> None:
    assert kind_of_path(path) is PathKind.CONTROL
