"""The start barrier of one pod: files that the start script of an engine with several pods waits for and looks at."""

from __future__ import annotations

import logging
import os

from sglang_rollout.agent.run_files import RunFiles
from sglang_rollout.wire.launch import Verdict, termination_message

log = logging.getLogger(__name__)


class Barrier:
    """Carries verdicts out."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self._go = files.boot.parent / "go"
        self._ended: str | None = None
        """The life that was told to end."""

    def boot(self) -> str | None:
        """The present life of the engine's container; None between two."""
        boot = _text(self.files.boot)
        if self._ended is not None and boot not in (None, self._ended):
            # The start script takes the wish away; it may have been written again just after that.
            self.files.kill.unlink(missing_ok=True)
            self._ended = None
        return boot

    def released(self, boot: str | None) -> bool:
        """Whether this life has been told to start SGLang."""
        return boot is not None and _text(self._go) == boot

    def obey(self, verdict: Verdict, boot: str | None, reason: str) -> None:
        """Do with the life ``boot`` what was decided about it; ``reason`` is a sentence."""
        if boot is None:
            return
        if verdict is Verdict.GO and not self.released(boot):
            log.info("All pods of the engine are there: it is started.")
            new = self._go.with_suffix(".new")
            new.write_text(boot)
            os.replace(new, self._go)
        if verdict is Verdict.END and self._ended != boot:
            log.warning("Asking for the restart of this pod's engine container: %s", reason)
            self.files.kill.write_text(termination_message(f"This pod restarts with the other pods of its engine: {reason}"))
            self._ended = boot


def _text(path: os.PathLike[str]) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip() or None
    except OSError:
        return None
