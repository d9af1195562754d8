"""Stand-in engines for tests: ``StandIn`` is one engine, ``StandInFleet`` several engines in one process."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import uvloop
from aiohttp import web

from sglang_rollout.testing.app import App, add_control
from sglang_rollout.testing.boot import Boot, Setup
from sglang_rollout.testing.faults import Faults, Hit
from sglang_rollout.testing.plugin import report_plugin
from sglang_rollout.testing.policy import VOCABULARY, Held, default_state, held_from, read_folder

T = TypeVar("T")
_START_SECONDS = 30.0
"""A stand-in starts within milliseconds; longer means that its loop is stuck."""


class StandIn:
    """One engine: a port, faults, and the state of its current boot.

    Use it in a ``with`` block, or call ``start`` and ``close``. Any thread may call it.

    Args:
        port: Port to listen on; 0 takes a free port and keeps it over restarts.
        host: Address to listen on.
        state: Base weights: a state dict of torch tensors or numpy arrays. Without ``state`` and ``model``: a tiny model with 5 tensors.
        model: Folder with safetensors files that have the base weights.
        sessions: False behaves as SGLang 0.5.20 and older, without begin_weight_update and end_weight_update.
        tensor: Number of tensor-parallel ranks.
        pipeline: Number of pipeline stages.
        data: Number of replicas of the model.
        loaders: Names of the loader of staged versions, as ``--custom-weight-loader`` has them.
        token_seconds: Seconds per generated token.
        weight_version: Version that each new boot reports.
        context_length: Maximum tokens of prompt and completion together.
        health_seconds: Timeout of /health_generate.
        vocabulary: Token IDs are below this number.
        lora: True to accept adapters.
        memory_saver: True to lose released weights, unless ``weights_backup`` is true.
        weights_backup: True to restore released weights.
        plugin: False imitates SGLang without the plug-in.
        updates_refused: Why SGLang refuses updates of the weights, for example because kernels hold data that it has derived from them.
        on_death: Called with the reason when the engine dies where SGLang would. It runs in the engine's event loop, so it must not call
            the engine.
        loop: Event loop that several engines share.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        state: Mapping[str, Any] | None = None,
        model: str | Path | None = None,
        sessions: bool = True,
        tensor: int = 1,
        pipeline: int = 1,
        data: int = 1,
        loaders: Sequence[str] = (),
        token_seconds: float = 0.0,
        weight_version: str = "default",
        context_length: int = 2048,
        health_seconds: float = 20.0,
        vocabulary: int = VOCABULARY,
        lora: bool = False,
        memory_saver: bool = False,
        weights_backup: bool = False,
        plugin: bool = True,
        updates_refused: str = "",
        on_death: Callable[[str], None] | None = None,
        loop: Loop | None = None,
    ) -> None:
        tensors: Mapping[str, Held] = held_from(state) if state is not None else read_folder(Path(model)) if model else default_state()
        self._setup = Setup(
            tensors=tensors,
            sessions=sessions,
            tensor_size=tensor,
            pipeline_size=pipeline,
            data_size=data,
            loaders=tuple(loaders),
            weight_version=weight_version,
            model_path=str(model or "stand-in"),
            token_seconds=token_seconds,
            context_length=context_length,
            health_seconds=health_seconds,
            vocabulary=vocabulary,
            lora=lora,
            memory_saver=memory_saver,
            weights_backup=weights_backup,
            plugin=plugin,
            updates_refused=updates_refused,
        )
        self.host, self.port = host, port
        self.faults = Faults()
        """Faults of the engine; kept over restarts."""
        self.deaths: list[str] = []
        """Reason of each death that was not a ``kill``."""
        self._on_death = on_death
        self._loop, self._own_loop = loop, loop is None
        self._boot: Boot | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """True while the engine listens."""
        return self._boot is not None

    @property
    def boot_id(self) -> str | None:
        """Identifies the current boot; None while the engine is dead."""
        return self._boot.boot_id if self._boot else None

    @property
    def fired(self) -> list[Hit]:
        """Faults that have hit, oldest first."""
        return list(self.faults.fired)

    @property
    def weight_version(self) -> str | None:
        """Version that /model_info reports; None while the engine is dead."""
        return self._boot.weight_version if self._boot else None

    def tensors(self) -> dict[str, Held]:
        """Return the tensors that the engine holds. Raises RuntimeError while it is dead."""
        if self._boot is None:
            raise RuntimeError(f"the stand-in at {self.url} is dead and holds nothing")
        weights = self._boot.weights
        return {name: weights[name] for name in weights}

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that the engine holds, as torch tensors."""
        from sglang_rollout.testing.process_groups import tensor  # noqa: PLC0415 - needs torch

        return {name: tensor(held.data, held.dtype, held.shape) for name, held in self.tensors().items()}

    def start(self) -> Self:
        """Boot with the base weights and no other state. Raises OSError if the port is taken, RuntimeError if the engine runs."""
        if self._boot is not None:
            raise RuntimeError(f"the stand-in at {self.url} is running already")
        self._loop = self._loop or Loop()
        self._loop.run(self._start())
        return self

    def kill(self) -> None:
        """End the engine as SIGKILL does: no call is answered, connections close. Does nothing if the engine is dead."""
        if self._loop is not None:
            self._loop.run(self._kill())

    def restart(self) -> Self:
        """Kill and start the engine: same port, base weights, new boot ID. Faults stay armed."""
        self.kill()
        return self.start()

    def close(self) -> None:
        """Kill the engine and free its resources."""
        self.kill()
        if self._own_loop and self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self if self.alive else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _start(self) -> None:
        boot = Boot(self._setup, self.faults, port=self.port, die=self._died)
        app = App(boot).make()
        add_control(app, boot, kill=partial(self._died, "asked to by /stand_in/kill"), restart=self._restart_soon)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, self.host, self.port, reuse_address=True)
        try:
            await site.start()
        except OSError:
            await runner.cleanup()
            raise
        self.port = boot.port = runner.addresses[0][1]
        report_plugin(boot)
        self._boot, self._runner = boot, runner

    async def _kill(self) -> None:
        boot, runner = self._boot, self._runner
        self._boot = self._runner = None
        if boot is None or runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        if runner.server is not None:
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        boot.kill()
        await runner.cleanup()

    def _died(self, why: str) -> None:
        self.deaths.append(why)
        if self._on_death:
            self._on_death(why)
        self._kill_soon()

    def _kill_soon(self) -> None:
        if self._loop is not None:
            self._loop.spawn(self._kill())

    def _restart_soon(self) -> None:
        async def both() -> None:
            await self._kill()
            await self._start()

        if self._loop is not None:
            self._loop.spawn(both())


class StandInFleet(Sequence[StandIn]):
    """Several engines in one process and one event loop, as a sequence of ``StandIn``.

    Args:
        engines: Number of engines.
        ports: Port of each engine; by default free ports.
        **options: Arguments of each ``StandIn``.
    """

    def __init__(self, engines: int, *, ports: Sequence[int] | None = None, **options: Any) -> None:
        if engines < 1 or (ports is not None and len(ports) != engines):
            raise ValueError(f"{engines} engines on {len(ports) if ports else 'any'} ports: give at least one engine, and a port for each.")
        if options.get("state") is not None:
            options["state"] = held_from(options["state"])  # converted once: engines share the bytes, which never change
        self._loop = Loop()
        chosen = ports or itertools.repeat(0, engines)
        self.engines = [StandIn(port=port, loop=self._loop, **options) for port in chosen]

    def __len__(self) -> int:
        return len(self.engines)

    @overload
    def __getitem__(self, at: int) -> StandIn: ...
    @overload
    def __getitem__(self, at: slice) -> list[StandIn]: ...
    def __getitem__(self, at: int | slice) -> StandIn | list[StandIn]:
        return self.engines[at]

    @property
    def urls(self) -> list[str]:
        """Base URLs of the engines, in order."""
        return [engine.url for engine in self.engines]

    def start(self) -> Self:
        """Start all engines."""
        try:
            for engine in self.engines:
                engine.start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Kill all engines and free their resources."""
        for engine in self.engines:
            with suppress(RuntimeError):
                engine.kill()
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="stand-in-loop")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this stand-in has been closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_SECONDS)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine, from within the loop."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop the loop. Does nothing if the loop is closed."""
        if self._loop.is_closed():
            return
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_SECONDS)
        self._loop.close()

    async def _end_tasks(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
