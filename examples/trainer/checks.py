"""Does every engine really hold the policy that was pushed? Asked of each engine by itself, past the router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from policy import PROMPT_TOKENS, Policy

from sglang_rollout.trainer import Fleet, FleetError, connect_engine

PROBES = [[10 + 7 * row + column for column in range(PROMPT_TOKENS)] for row in range(12)]
PROBE_TOKENS = 16


class CheckFailed(Exception):
    """An engine does not hold what it should."""


class EngineChecks:
    """Greedy tokens of every engine against those of the local policy."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self._fleet = fleet
        self._before = policy.greedy(PROBES, PROBE_TOKENS)
        self.pushes = 0
        self.changed = 0
        """Pushes after which the policy's own greedy tokens were others than before. The rest proves nothing new: a
        policy that has learned all there is to learn says the same before and after.
        """

    def after_push(self, policy: Policy, version: int) -> None:
        """Every engine says what the policy says at ``version``, under its label, and not what it said before."""
        expected = policy.greedy(PROBES, PROBE_TOKENS)
        members = self._fleet.document().members
        with ThreadPoolExecutor(len(members)) as pool:
            list(pool.map(lambda member: self._one(member.name, member.url, expected, version), members))
        self.pushes += 1
        self.changed += expected != self._before
        self._before = expected

    def _one(self, name: str, url: str, expected: list[list[int]], version: int) -> None:
        with connect_engine(url) as engine:
            params = {"temperature": 0, "max_new_tokens": PROBE_TOKENS, "ignore_eos": True}
            try:
                samples = engine.generate(input_ids=PROBES, sampling_params=params, timeout=60)
            except FleetError as error:
                raise CheckFailed(f"Engine {name} at {url} does not answer after the push of version {version}: {error}") from error
        labels = {span.version for sample in samples for span in sample.weight_versions}
        if labels != {str(version)}:
            raise CheckFailed(f"Engine {name} answers with version {sorted(labels)}, not {version}.")
        said = [sample.output_ids for sample in samples]
        if said != expected:
            stale = "it still says what version before said" if said == self._before else "they are of neither version"
            raise CheckFailed(f"Engine {name}: its greedy tokens are not those of the policy at version {version}; {stale}.")
