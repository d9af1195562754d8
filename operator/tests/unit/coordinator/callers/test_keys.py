"""Requests for the keys of the API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_rollout.coordinator.callers.keys import load_keys
from sglang_rollout.kube.errors import NotFound
from tests.support.account_tokens import ISSUER, make_key
from tests.unit.kube.support.scripted_api import ok, scripted, status


async def test_issuer_and_keys_are_read_as_any_type(tmp_path: Path) -> None:
    """The API server offers its keys as application/jwk-set+json only, and refuses a request that accepts nothing but JSON."""
    key = make_key("ec")
    async with scripted(tmp_path, ok({"issuer": ISSUER}), ok({"keys": [key.published]})) as (script, kube):
        found = await load_keys(kube)
    assert (found.issuer, set(found.keys)) == (ISSUER, {"ec"})
    assert [request[1] for request in script.requests] == ["/.well-known/openid-configuration", "/openid/v1/jwks"]
    assert "*/*" in script.headers[1]["Accept"]


async def test_a_cluster_that_publishes_no_keys_is_an_error(tmp_path: Path) -> None:
    async with scripted(tmp_path, status(404, "the server could not find the requested resource", "NotFound")) as (_, kube):
        with pytest.raises(NotFound):
            await load_keys(kube)
