"""The sampling parameters in the discovery document: names that no engine and no router drops or refuses."""

from __future__ import annotations

from sglang_rollout.coordinator.http.info import list_sampling_params


def test_a_name_must_be_known_to_every_engine_because_any_engine_may_get_the_request() -> None:
    assert list_sampling_params([["top_k", "n", "watermark"], ["n", "top_k"], []]) == ["n", "top_k"]


def test_nothing_is_said_before_an_engine_has_reported() -> None:
    assert list_sampling_params([]) == []
    assert list_sampling_params([[], []]) == []


def test_a_name_of_a_newer_release_that_smg_would_drop_is_left_out() -> None:
    assert list_sampling_params([["n", "of_a_newer_release"]]) == ["n"]
