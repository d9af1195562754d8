"""Labels in haproxy's map and in a header line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.agent.gate import Gate
from sglang_rollout.proxy.cli import find_haproxy
from sglang_rollout.proxy.gate_map import ADAPTERS_KEY, ADAPTERS_LONGEST, NO_VERSION, UNSET, encode_adapters, encode_label, version_map_path


@pytest.mark.parametrize(
    ("label", "shown"), [("step 1", "step 1"), ("é", "?"), ("政策 7", "?? 7"), ("a\r\nX-Evil: 1", "a X-Evil: 1"), ("?", "?")]
)
def test_label_in_the_header(label: str, shown: str) -> None:
    assert unquote(encode_label(label)) == shown


@given(st.text(max_size=40))
def test_label_is_one_word_on_the_socket_and_one_line_in_the_header(label: str) -> None:
    value = encode_label(label)
    assert value.isascii()
    assert not set(value) & set(" \t\r\n;\\<>#\"'")
    assert (value == NO_VERSION) == (not label.split())
    assert unquote(value).isprintable()


@pytest.mark.router
async def test_haproxy_takes_the_longest_list_of_adapters(tmp_path: Path) -> None:
    socket = tmp_path / ("g" * (96 - len(str(tmp_path))))  # haproxy takes no longer path
    Path(version_map_path(str(socket))).write_text(UNSET)
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        f"global\n stats socket {socket} level admin\ndefaults\n mode http\n timeout client 1s\nfrontend f\n"
        f" bind unix@{tmp_path}/f\n http-request set-var(txn.v) str(x),map({version_map_path(str(socket))})\n"
    )
    haproxy = await asyncio.create_subprocess_exec(find_haproxy() or "haproxy", "-db", "-f", str(config))
    try:
        async with asyncio.timeout(30):
            while not socket.is_socket():
                await asyncio.sleep(0.05)
        name = "x" * (ADAPTERS_LONGEST - 2)
        assert len(encode_adapters([name])) == ADAPTERS_LONGEST
        gate = Gate(socket, timeout=30)
        await gate.set_entry(ADAPTERS_KEY, encode_adapters([name]))
        assert name in await gate._command(f"show map {version_map_path(str(socket))}")
    finally:
        haproxy.kill()
        await haproxy.wait()
