"""Requests that the Kubernetes client sends, and errors for failed replies."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.credentials import load_configuration
from sglang_rollout.kube.errors import ApiUnavailable, Conflict, Expired, KubeError, NoCredentials, NotFound, Refused
from sglang_rollout.kube.resources import CONFIGMAPS, PODS, ROLLOUTS, STATEFULSETS
from tests.unit.kube.support.scripted_api import ok, scripted, status, stream, write_kubeconfig


async def test_apply_is_a_forced_server_side_apply(tmp_path: Path) -> None:
    obj = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "x", "namespace": "n"}}
    async with scripted(tmp_path, ok(obj)) as (script, kube):
        assert await kube.apply(obj) == obj
    path = "/apis/apps/v1/namespaces/n/statefulsets/x"
    assert script.requests == [("PATCH", path, {"fieldManager": "tester", "force": "true"}, obj)]
    assert script.headers[0]["Content-Type"].partition(";")[0] == "application/apply-patch+yaml"
    assert script.headers[0]["Authorization"] == "Bearer first"
    assert script.headers[0]["User-Agent"] == "tester"


async def test_any_character_can_be_applied(tmp_path: Path) -> None:
    """An apply is read as YAML, which has no surrogate pairs. An error message of gloo ends with an emoji."""
    said = "GLHF! \U0001f3d6 \x1b[0m \x85 \ud83c"
    obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "n"}, "data": {"said": said}}
    async with scripted(tmp_path, ok(obj)) as (script, kube):
        await kube.apply(obj)
    assert "\\ud8" not in script.bodies[0]
    assert "\x85" not in script.bodies[0], "a control character, which YAML refuses"
    assert script.requests[0][3]["data"]["said"] == said.replace("\ud83c", "\ufffd")


async def test_status_is_applied_to_the_subresource(tmp_path: Path) -> None:
    obj = {"apiVersion": ROLLOUTS.api_version, "kind": ROLLOUTS.kind, "metadata": {"name": "x", "namespace": "n"}}
    async with scripted(tmp_path, ok(obj)) as (script, kube):
        await kube.apply(obj, subresource="status")
    assert script.requests[0][1] == "/apis/rollout.sglang.io/v1alpha1/namespaces/n/sglangrollouts/x/status"


async def test_merge_patch_can_require_a_resource_version(tmp_path: Path) -> None:
    async with scripted(tmp_path, ok({}), status(409, "the object has been modified", "Conflict")) as (script, kube):
        await kube.merge_patch(CONFIGMAPS, "n", "x", {"data": {"a": "b"}}, resource_version="7")
        assert script.requests[0][3] == {"data": {"a": "b"}, "metadata": {"resourceVersion": "7"}}
        assert script.headers[0]["Content-Type"] == "application/merge-patch+json"
        with pytest.raises(Conflict, match="patch configmaps n/x: the object has been modified"):
            await kube.merge_patch(CONFIGMAPS, "n", "x", {}, resource_version="7")


async def test_delete_requires_the_uid(tmp_path: Path) -> None:
    async with scripted(tmp_path, ok({})) as (script, kube):
        await kube.delete(PODS, "n", "x", uid="u1")
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    expected = {**options, "preconditions": {"uid": "u1"}}
    assert script.requests == [("DELETE", "/api/v1/namespaces/n/pods/x", {}, expected)]


async def test_list_reads_all_pages_and_adds_the_kind_to_items(tmp_path: Path) -> None:
    pages = (
        ok({"metadata": {"continue": "more", "resourceVersion": "5"}, "items": [{"metadata": {"name": "a"}}]}),
        ok({"metadata": {"resourceVersion": "5"}, "items": [{"metadata": {"name": "b"}}]}),
    )
    async with scripted(tmp_path, *pages) as (script, kube):
        listing = await kube.list(STATEFULSETS, "n", labels={"r": "demo", "present": None}, fields={"metadata.name": "a"})
    assert [(item["kind"], item["apiVersion"], item["metadata"]["name"]) for item in listing.items] == [
        ("StatefulSet", "apps/v1", "a"),
        ("StatefulSet", "apps/v1", "b"),
    ]
    assert listing.resource_version == "5"
    query = {"limit": "500", "labelSelector": "present,r=demo", "fieldSelector": "metadata.name=a"}
    assert script.requests[0][2] == query
    assert script.requests[1][2] == {**query, "continue": "more"}


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", Conflict),
        (410, "Expired", Expired),
        (400, "BadRequest", Refused),
        (403, "Forbidden", Refused),
        (422, "Invalid", Refused),
        (429, "TooManyRequests", ApiUnavailable),
        (500, "InternalError", ApiUnavailable),
        (503, "ServiceUnavailable", ApiUnavailable),
    ],
)
async def test_failed_reply_is_an_error_with_the_message_of_the_server(
    tmp_path: Path, code: int, reason: str, kind: type[KubeError]
) -> None:
    async with scripted(tmp_path, status(code, "because of this", reason, Retry_After="7")) as (_, kube):
        with pytest.raises(KubeError, match="get pods n/x: because of this") as caught:
            await kube.get(PODS, "n", "x")
    assert type(caught.value) is kind
    if isinstance(caught.value, ApiUnavailable):
        assert caught.value.retry_after == 7.0
    if isinstance(caught.value, Refused):
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("code", "message", "reason", "kind"),
    [
        (500, "failed to create typed patch object (n/x): .spec.enviroment: field not declared in schema", "", Refused),
        (500, "Internal error occurred: failed calling webhook: no endpoints available", "InternalError", Refused),
        (500, "etcdserver: request timed out", "", ApiUnavailable),
        (500, "Internal error occurred: etcdserver: leader changed", "InternalError", ApiUnavailable),
        (500, "rpc error: code = Unavailable desc = connection error", "", ApiUnavailable),
        (502, "because of this", "", ApiUnavailable),
        (503, "because of this", "ServiceUnavailable", ApiUnavailable),
        (504, "because of this", "Timeout", ApiUnavailable),
    ],
)
async def test_server_error_about_the_sent_object_is_a_refusal(
    tmp_path: Path, code: int, message: str, reason: str, kind: type[KubeError]
) -> None:
    obj = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": "n"}}
    async with scripted(tmp_path, *(status(code, message, reason) for _ in range(2))) as (_, kube):
        with pytest.raises(KubeError, match=re.escape(message)) as caught:
            await kube.apply(obj)
        with pytest.raises(KubeError) as deleting:
            await kube.delete(PODS, "n", "x")
    assert type(caught.value) is type(deleting.value) is kind


async def test_server_error_of_a_proxy_is_an_outage(tmp_path: Path) -> None:
    async with scripted(tmp_path, web.Response(status=500, text="<html>"), web.json_response({"message": "no"}, status=500)) as (_, kube):
        for _ in range(2):
            with pytest.raises(ApiUnavailable):
                await kube.delete(PODS, "n", "x")


async def test_reply_that_is_not_json_is_an_outage(tmp_path: Path) -> None:
    pages = (web.Response(text="<html>"), web.Response(status=502, text="<html>"), web.json_response([1]))
    async with scripted(tmp_path, *pages) as (_, kube):
        with pytest.raises(ApiUnavailable, match="is this the address of a Kubernetes API server"):
            await kube.get(PODS, "n", "x")
        with pytest.raises(ApiUnavailable, match="HTTP 502"):
            await kube.get(PODS, "n", "x")
        with pytest.raises(ApiUnavailable, match="no JSON object"):
            await kube.get(PODS, "n", "x")


async def test_refused_connection_is_an_outage(tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1")
    async with await Kube.connect(field_manager="t", kubeconfig=kubeconfig) as kube:
        with pytest.raises(ApiUnavailable, match=r"API server at http://127\.0\.0\.1:1 cannot be reached"):
            await kube.get(PODS, "n", "x")


async def test_missing_answer_is_an_outage(tmp_path: Path) -> None:
    async def sleep(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return ok({})

    async with scripted(tmp_path, sleep, deadline=0.1) as (_, kube):
        with pytest.raises(ApiUnavailable, match=r"no answer from .* within the deadline"):
            await kube.get_path("/version")


async def test_expired_token_is_read_again_once(tmp_path: Path) -> None:
    async with scripted(tmp_path, status(401, "Unauthorized"), ok({"a": 1}), status(401, "no"), status(401, "no")) as (
        script,
        kube,
    ):
        write_kubeconfig(tmp_path / "kubeconfig", kube.server, token="second")
        assert await kube.get(PODS, "n", "x") == {"a": 1}
        assert [headers["Authorization"] for headers in script.headers] == ["Bearer first", "Bearer second"]
        with pytest.raises(Refused) as caught:
            await kube.get(PODS, "n", "x")
        assert caught.value.code == 401


def line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


async def test_watch_joins_lines_and_ends_with_the_stream(tmp_path: Path) -> None:
    long = "x" * 5_000_000
    data = line("ADDED", {"n": 1}) + b"\n" + line("MODIFIED", {"n": long}) + line("BOOKMARK", {"n": 3})
    cut = (data[:7], data[7:100], data[100:])
    async with scripted(tmp_path, stream(*cut)) as (script, kube):
        events = [event async for event in kube.watch(PODS, "n", resource_version="4", labels={"r": None})]
    assert [(event.type, event.object["n"]) for event in events] == [("ADDED", 1), ("MODIFIED", long), ("BOOKMARK", 3)]
    query = script.requests[0][2]
    assert query["labelSelector"] == "r"
    assert (query["resourceVersion"], query["allowWatchBookmarks"], query["watch"]) == ("4", "true", "true")


@pytest.mark.parametrize(("code", "kind"), [(410, Expired), (403, Expired), (500, ApiUnavailable)])
async def test_error_event_ends_a_watch(tmp_path: Path, code: int, kind: type[KubeError]) -> None:
    data = line("ERROR", {"kind": "Status", "code": code, "message": "too old resource version"})
    async with scripted(tmp_path, stream(data)) as (_, kube):
        with pytest.raises(kind, match="watch pods n: too old"):
            async for _ in kube.watch(PODS, "n", resource_version="4"):
                pass


async def test_calls_are_counted(tmp_path: Path) -> None:
    calls: list[tuple[str, str, str]] = []
    replies = (ok({}), status(404, "gone"), stream(line("ADDED", {"n": 1})))
    async with scripted(tmp_path, *replies, on_call=lambda *call: calls.append(call)) as (_, kube):
        await kube.get(PODS, "n", "x")
        with pytest.raises(NotFound):
            await kube.delete(PODS, "n", "x")
        async for _ in kube.watch(CONFIGMAPS, "n", resource_version="1"):
            pass
    assert calls == [("get", "pods", "ok"), ("delete", "pods", "error"), ("watch", "configmaps", "ok")]


async def test_missing_credentials_are_reported_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(NoCredentials, match=r"no kubeconfig at .*missing, and not in a cluster: name one with --kubeconfig"):
        await Kube.connect(field_manager="t")
    broken = tmp_path / "broken"
    broken.write_text("{}")
    with pytest.raises(NoCredentials, match="cannot be used"):
        await Kube.connect(field_manager="t", kubeconfig=str(broken))


async def test_certificates_without_the_extensions_that_python_demands_are_accepted(tmp_path: Path) -> None:
    """Python 3.13 checks with ``VERIFY_X509_STRICT`` unless this option is set."""
    configuration = await load_configuration(str(write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")))
    assert configuration.verify_ssl
    assert configuration.disable_strict_ssl_verification
