"""Reads what the plug-in inside SGLang reports, and tells the agent whether its proof is complete.

:mod:`.cli` runs the watch about twice a second. The gate of an agent that requires the plug-in stays closed until the proof is complete.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sglang_rollout.agent import events as ev
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.launch.member_pod import MemberPod
from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.plugin.reports import Reports
from sglang_rollout.sglang.client import HEALTH_SECONDS, EngineError
from sglang_rollout.sglang.sizes import count_schedulers

log = logging.getLogger(__name__)

_ASK_SECONDS = 5.0
"""Time between two requests for a token, which a scheduler needs for its report if SGLang's own warm-up is turned off."""


class PluginWatch:
    """Reads the reports until the proof of the known engine process is complete.

    Args:
        agent: The agent.
        reports: The reports of this pod.
        count_proved_elsewhere: Returns the number of schedulers in the engine's other pods whose proof is complete.
    """

    def __init__(self, agent: Agent, reports: PluginReports, count_proved_elsewhere: Callable[[], int] = lambda: 0) -> None:
        self._agent = agent
        self._reports = reports
        self._count_proved_elsewhere = count_proved_elsewhere
        self._asked_at = 0.0

    async def watch(self) -> None:
        """Read the reports once, and ask the engine for a token if a part of the proof is missing."""
        agent, proof = self._agent, self._agent.state.plugin
        boot_id = agent.state.record.boot_id
        if proof.missing == "" or not agent.state.up or boot_id is None:
            return
        info = agent.engine.info
        reports = await asyncio.to_thread(self._reports.read, agent.engine.container_boot_id(), info)
        wanted = count_schedulers(info) - self._count_proved_elsewhere()
        missing = reports.missing(wanted, cache_key=self._reports.cache_key) or ""
        if missing != proof.missing and proof.is_required and agent.state.record.boot_id == boot_id:
            log.info("%s", missing or "The plug-in is active in all processes of the engine.")
        agent.dispatch(ev.PluginChecked(boot_id, missing, reports.updates_refused, reports.sampling_params))
        if missing and proof.is_required:
            await self._ask_for_token()

    async def _ask_for_token(self) -> None:
        record, now = self._agent.state.record, time.monotonic()
        if now - self._asked_at < _ASK_SECONDS or record.pending or record.session or record.interruption.is_pause:
            return
        self._asked_at = now
        try:
            await self._agent.engine.check_alive(timeout=HEALTH_SECONDS)
        except EngineError as error:
            log.info("The engine did not generate a token for the plug-in's proof: %s.", error)


class MemberPluginWatch:
    """Counts the schedulers of a member pod in which the plug-in has proved that it is active.

    Args:
        member: The member pod.
        reports: The reports of this pod.
    """

    def __init__(self, member: MemberPod, reports: PluginReports) -> None:
        self._member = member
        self._reports = reports

    async def watch(self) -> None:
        """Read the reports once."""
        boot_id = self._member.boot_id()
        found = await asyncio.to_thread(self._reports.read, boot_id, {}) if boot_id is not None else Reports()
        is_proved = found.missing(len(found.schedulers), requests=False, cache_key=self._reports.cache_key) is None
        self._member.proved_schedulers = len(found.schedulers) if is_proved else 0
