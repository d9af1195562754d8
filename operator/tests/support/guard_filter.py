"""Run the gate's filter over bodies, in haproxy's Lua."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.proxy.cli import find_haproxy
from sglang_rollout.proxy.config import guard_text

LIMITS = Limits()


def run(
    folder: Path, cases: Sequence[tuple[str, str, str | bytes]], adapters: str = "?", limits: Limits = LIMITS, *, processors: bool = False
) -> list[str]:
    """The sentence about each body, empty if it passes; the same for all pieces in which it may come."""
    (folder / "guard.lua").write_text(guard_text(limits, custom_logit_processors=processors))
    (folder / "cases").write_text("".join(f"{path} {vocabulary} {adapters} {_bytes(body).hex()}\n" for path, vocabulary, body in cases))
    config = folder / "haproxy.cfg"
    config.write_text(f"global\n    lua-load {Path(__file__).with_name('guard_cases.lua')}\ndefaults\n    mode http\n")
    names = {key: str(folder / name) for key, name in (("GUARD", "guard.lua"), ("CASES", "cases"), ("RESULTS", "results"))}
    done = subprocess.run(
        [find_haproxy() or "haproxy", "-c", "-f", str(config)],
        env=os.environ | names, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (folder / "results").exists(), done.stderr
    rows = [line.split("\t") for line in (folder / "results").read_text().splitlines()]
    assert len(rows) == len(cases), done.stderr
    for (same, _), case in zip(rows, cases, strict=True):
        assert same == "true", f"the answer depends on how the body is cut: {case}"
    return [sentence for _, sentence in rows]


def _bytes(body: str | bytes) -> bytes:
    return body.encode() if isinstance(body, str) else body
