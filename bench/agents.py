"""Run the agents of many engines in one process, each on its own port, with gates that exist only in memory.

    python -m bench.agents FOLDER FIRST_PORT ENGINE_URL...

With 64 agents and 64 haproxy processes, the result would measure the machine's process switches. Without gates, each call has one hop
less, and an agent sends no command when its gate opens or closes. The agents themselves work as in a pod.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import uvloop

from sglang_rollout.agent import cli
from sglang_rollout.agent.gate import Gate, GateView
from sglang_rollout.credentials import CredentialFile
from sglang_rollout.proxy.address import Address


class MemoryGate(Gate):
    """A gate that opens and closes at once."""

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self._open = False

    async def view(self) -> GateView:
        """Return the state that was set last."""
        return GateView(pid=1, ready=self._open, up=self._open)

    async def set(self, *, is_open: bool) -> GateView:
        """Open or close."""
        self._open = is_open
        return await self.view()

    async def _send(self, command: str) -> None:
        """Ignore commands about labels, limits and cuts, because this gate has no connections."""


async def main() -> None:
    """Run all agents until SIGTERM ends the process."""
    folder, first, urls = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    logging.basicConfig(level=logging.WARNING)
    setattr(cli, "Gate", MemoryGate)  # noqa: B010 - the class that each agent uses
    key = CredentialFile(folder / "token")
    agents = [
        cli.run(
            cli.Settings(
                name=f"e{index}",
                engine_url=url,
                listen=Address("127.0.0.1", first + index),
                gate_socket=folder / "none",
                state_dir=folder / f"e{index}",
                credentials=key.derive(f"e{index}"),
            )
        )
        for index, url in enumerate(urls)
    ]
    await asyncio.wait([asyncio.create_task(agent) for agent in agents], return_when=asyncio.FIRST_COMPLETED)


if __name__ == "__main__":
    uvloop.run(main())
