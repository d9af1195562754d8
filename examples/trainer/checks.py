"""Check that every engine holds the pushed policy, by sampling from each engine directly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from policy import PROMPT_TOKENS, Policy

from sglang_rollout.trainer import Fleet, FleetError, connect_engine

PROBES = [[10 + 7 * row + column for column in range(PROMPT_TOKENS)] for row in range(12)]
PROBE_TOKENS = 16


class CheckFailed(Exception):
    """An engine does not hold the pushed policy."""


class EngineChecks:
    """Compare the greedy tokens of every engine with those of the local policy."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self._fleet = fleet
        self._before = policy.greedy(PROBES, PROBE_TOKENS)
        self.pushes = 0
        self.changed = 0
        """Pushes that changed the policy's greedy tokens. Other pushes prove nothing new."""

    def after_push(self, policy: Policy, version: int) -> None:
        """Check that every engine generates the policy's greedy tokens, with the label of ``version``.

        Raises:
            CheckFailed: An engine does not answer, or generates other tokens.
        """
        expected = policy.greedy(PROBES, PROBE_TOKENS)
        members = self._fleet.document().members
        with ThreadPoolExecutor(len(members)) as pool:
            list(pool.map(lambda member: self._check_engine(member.name, member.url, expected, version), members))
        self.pushes += 1
        self.changed += expected != self._before
        self._before = expected

    def _check_engine(self, name: str, url: str, expected: list[list[int]], version: int) -> None:
        with connect_engine(url) as engine:
            params = {"temperature": 0, "max_new_tokens": PROBE_TOKENS, "ignore_eos": True}
            try:
                samples = engine.generate(input_ids=PROBES, sampling_params=params, timeout=60)
            except FleetError as error:
                raise CheckFailed(f"Engine {name} at {url} does not answer after the push of version {version}: {error}") from error
        labels = {span.version for sample in samples for span in sample.weight_versions}
        if labels != {str(version)}:
            raise CheckFailed(f"Engine {name} answers with version {sorted(labels)}, not {version}.")
        tokens = [sample.output_ids for sample in samples]
        if tokens != expected:
            stale = "they are those of the previous version" if tokens == self._before else "they are of neither version"
            raise CheckFailed(f"Engine {name}: its greedy tokens are not those of the policy at version {version}; {stale}.")
