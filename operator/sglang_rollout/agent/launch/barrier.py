"""Start barrier of one pod: files by which the agent starts and ends SGLang in an engine of several pods."""

from __future__ import annotations

import logging
import os

from sglang_rollout.agent.run_files import RunFiles
from sglang_rollout.wire.agent import Verdict, termination_message

log = logging.getLogger(__name__)


class Barrier:
    """Carries out verdicts on the engine's container of this pod."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self._go = files.boot.parent / "go"
        self._ended: str | None = None
        """Boot ID of the run that was ended."""

    def boot(self) -> str | None:
        """Return the boot ID of the engine's container; None while it does not run."""
        boot = _text(self.files.boot)
        if self._ended is not None and boot not in (None, self._ended):
            # The start script deletes the file, but the agent may have written it again just afterwards.
            self.files.kill.unlink(missing_ok=True)
            self._ended = None
        return boot

    def released(self, boot: str | None) -> bool:
        """Return whether SGLang was started in this run of the container."""
        return boot is not None and _text(self._go) == boot

    def obey(self, verdict: Verdict, boot: str | None, reason: str) -> None:
        """Carry out the verdict on the run ``boot`` of the container; ``reason`` is a sentence."""
        if boot is None:
            return
        if verdict is Verdict.GO and not self.released(boot):
            log.info("All pods of the engine are ready: starting SGLang.")
            new = self._go.with_suffix(".new")
            new.write_text(boot)
            os.replace(new, self._go)
        if verdict is Verdict.END and self._ended != boot:
            log.warning("Requesting the restart of this pod's engine container: %s", reason)
            self.files.kill.write_text(termination_message(f"This pod restarts with the other pods of its engine: {reason}"))
            self._ended = boot


def _text(path: os.PathLike[str]) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip() or None
    except OSError:
        return None
