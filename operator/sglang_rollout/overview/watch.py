"""Follow one rollout and its ConfigMaps, and show it after every change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from sglang_rollout.kube.client import Kube, Listing
from sglang_rollout.kube.errors import ApiUnavailable, KubeError, Refused
from sglang_rollout.kube.resources import CONFIGMAPS, ROLLOUTS, Object
from sglang_rollout.kube.watch import follow_changes
from sglang_rollout.overview.observation import Observation, build_observation
from sglang_rollout.overview.observe import CONFIG_MAPS, AbsentError, describe_gap, name_right, observe

RECONNECT_SECONDS = 300.0
"""Longest time without an answer of the API server. An API server restarts in less."""
TICK_SECONDS = 10.0
"""Interval of screens without a change, because a screen shows how long ago something was."""
MIN_INTERVAL_SECONDS = 0.5
"""Shortest time between two screens: one push changes the objects several times."""
_VERBS = ("list", "watch")
_ROLLOUT = ""
"""Key of the SGLangRollout. Keys of the ConfigMaps are the ends of their names."""

Show = Callable[[Observation], None]


class LostError(Exception):
    """The API server has not answered for too long. ``str()`` is a sentence."""


async def watch(kube: Kube, namespace: str, name: str, show: Show, *, utc_now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
    """Show a rollout now, after every change, and from time to time. Never ends.

    Raises:
        AbsentError: There is no such rollout, or it was deleted.
        LostError: The API server has not answered for ``RECONNECT_SECONDS``.
        KubeError: The rollout cannot be read.
        UnreadableError: The rollout has another form than this release knows.
    """
    show(await observe(kube, namespace, name))
    watched = _Watched(namespace, name, utc_now)
    tasks = [asyncio.create_task(watched.follow(kube, key), name=f"watch {name} {key}") for key in (_ROLLOUT, *CONFIG_MAPS)]
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await watched.changed.wait()
            watched.changed.clear()
            for task in tasks:
                if task.done():
                    task.result()  # a defect ended it
            watched.check()
            if watched.is_complete:
                show(watched.build())
            await asyncio.sleep(MIN_INTERVAL_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Watched:
    """What the watches have sent so far."""

    def __init__(self, namespace: str, name: str, utc_now: Callable[[], datetime]) -> None:
        self.changed = asyncio.Event()
        self._namespace = namespace
        self._name = name
        self._utc_now = utc_now
        self._objects: dict[str, Object | None] = {}
        """None: the object does not exist."""
        self._refused: dict[str, KubeError] = {}
        """Why an object was not read."""
        self._lost: dict[str, tuple[float, KubeError]] = {}
        """Since when a watch gets no answer, and the newest error."""

    async def follow(self, kube: Kube, key: str) -> None:
        """Follow one object forever."""
        resource, name = (CONFIGMAPS, f"{self._name}-{key}") if key else (ROLLOUTS, self._name)
        async for change in follow_changes(kube, resource, self._namespace, name=name, on_error=partial(self._note_error, key)):
            self._lost.pop(key, None)
            if isinstance(change, Listing):
                self._objects[key] = next(iter(change.items), None)
            elif change.type != "BOOKMARK":
                self._objects[key] = None if change.type == "DELETED" else change.object
            self.changed.set()

    def _note_error(self, key: str, error: KubeError) -> None:
        if isinstance(error, ApiUnavailable):
            since, _ = self._lost.get(key, (asyncio.get_running_loop().time(), error))
            self._lost[key] = (since, error)
        else:
            self._refused[key] = error
        self.changed.set()

    def check(self) -> None:
        """Raise an error if there is nothing to show any more: see :func:`watch`."""
        if self._lost_seconds > RECONNECT_SECONDS:
            raise LostError(f"The API server has not answered for {RECONNECT_SECONDS:g} s: {self._last_error}")
        if _ROLLOUT not in self._objects and (error := self._refused.get(_ROLLOUT)):
            raise name_right(error, _VERBS, ROLLOUTS, self._namespace, self._name) if isinstance(error, Refused) else error
        if _ROLLOUT in self._objects and self._objects[_ROLLOUT] is None:
            raise AbsentError(f"SGLangRollout {self._name} in namespace {self._namespace} was deleted.")

    @property
    def is_complete(self) -> bool:
        """True if each object was read, or cannot be read."""
        return _ROLLOUT in self._objects and all(key in self._objects or key in self._refused for key in CONFIG_MAPS)

    @property
    def _lost_seconds(self) -> float:
        return max((asyncio.get_running_loop().time() - since for since, _ in self._lost.values()), default=0.0)

    @property
    def _last_error(self) -> KubeError | None:
        return next((error for _, error in self._lost.values()), None)

    def build(self) -> Observation:
        """Return what is known now."""
        rollout = self._objects[_ROLLOUT]
        assert rollout is not None, "check() has raised AbsentError"  # noqa: S101
        gaps = [
            describe_gap(self._refused[key], _VERBS, self._namespace, self._name, key) for key in CONFIG_MAPS if key not in self._objects
        ]
        if self._lost:
            since = self._utc_now() - timedelta(seconds=self._lost_seconds)
            first, last = (time.astimezone().strftime("%H:%M:%S") for time in (since, since + timedelta(seconds=RECONNECT_SECONDS)))
            gaps.append(f"The API server has not answered since {first}, and this command tries again until {last}. {self._last_error}")
        intent, record = (self._objects.get(key) for key in CONFIG_MAPS)
        return build_observation(rollout, intent, record, tuple(gaps))
