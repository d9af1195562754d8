"""Labels in haproxy's map and in a header line."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.proxy.gate_map import NO_VERSION, encode_label


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
