"""The reports of the plug-in in one pod."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_rollout.plugin.reports import Reports, read_reports
from sglang_rollout.plugin.runs import find_run
from sglang_rollout.sglang.sizes import read_size


class PluginReports:
    """The reports of the plug-in in this pod.

    Args:
        folder: Folder of the reports, which the engine's processes write.
        cache_key: True if each version must have a prefix cache of its own.
    """

    def __init__(self, folder: Path, *, cache_key: bool = True) -> None:
        self._folder = folder
        self.cache_key = cache_key

    def read(self, boot_id: str | None, info: Mapping[str, Any]) -> Reports:
        """Return the reports of an engine process. Blocks.

        Args:
            boot_id: ID of the run, which the container's start script wrote; None without a container. Then the newest run counts that
                names the port and the seed of ``info``.
            info: The engine's ``/server_info``.
        """
        run = boot_id or find_run(self._folder, port=read_size(info, "port") or 0, seed=read_size(info, "random_seed") or 0)
        return read_reports(self._folder, run) if run else Reports()
