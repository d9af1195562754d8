"""Check that every engine holds the pushed policy, by sampling from each engine directly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from policy import PROMPT_TOKENS, Policy

from sglang_rollout.trainer import Fleet, FleetError, Sample, connect_engine

PROBES = [[10 + 7 * row + column for column in range(PROMPT_TOKENS)] for row in range(12)]
PROBE_TOKENS = 16
ANSWER_SECONDS = 60.0
TIE = 1e-4
"""An engine may choose a token whose log-probability is lower than the best one's by this much. Log-probabilities of SGLang and of torch in
float32 differed by up to 4e-6 (57,600 tokens), and the two best tokens are closer than 1e-4 after one prefix of 1600."""


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
            CheckFailed: At least one engine does not answer, or generates other tokens. The message describes all of them.
        """
        expected = policy.greedy(PROBES, PROBE_TOKENS)
        members = self._fleet.document().members
        with ThreadPoolExecutor(len(members)) as pool:
            answers = list(pool.map(_sample, [member.url for member in members]))
        problems = [
            f"Engine {member.name} at {member.url} {problem}."
            for member, answer in zip(members, answers, strict=True)
            if (problem := self._find_problem(policy, answer, version))
        ]
        if problems:
            raise CheckFailed(" ".join(problems))
        self.pushes += 1
        self.changed += expected != self._before
        self._before = expected

    def _find_problem(self, policy: Policy, answer: list[Sample] | FleetError, version: int) -> str:
        """Return what is wrong with an engine's answer, as a clause; empty if the engine holds the policy."""
        if isinstance(answer, FleetError):
            return f"does not answer after the push of version {version}: {str(answer).rstrip('.')}"
        labels = {span.version for sample in answer for span in sample.weight_versions}
        if labels != {str(version)}:
            return f"answers with version {sorted(labels)}, not {version}"
        tokens = [sample.output_ids for sample in answer]
        if lengths := {len(row) for row in tokens} - {PROBE_TOKENS}:
            return f"generates {sorted(lengths)} tokens, not {PROBE_TOKENS}"
        best = policy.best_tokens(PROBES, tokens)
        wrong = [(row, place) for row in range(len(tokens)) for place in range(PROBE_TOKENS) if best[row][place][1] > TIE]
        if not wrong:
            return ""
        row, place = wrong[0]
        token, lead = best[row][place]
        stale = "all are those of the previous version" if tokens == self._before else "they are of neither version"
        cached = answer[row].meta_info.get("cached_tokens", 0)  # above 0: the engine used a prefix of older weights
        return (
            f"generates other tokens than the policy at version {version}: {len(wrong)} of {len(tokens) * PROBE_TOKENS}; {stale}; the first"
            f" is token {place} of probe {row}: {tokens[row][place]} and not {token}, whose log-probability is {lead:.2g} higher;"
            f" {cached} tokens of the prompt came from the engine's cache"
        )


def _sample(url: str) -> list[Sample] | FleetError:
    """Return the greedy samples of the engine at ``url``, or why it gave none."""
    params = {"temperature": 0, "max_new_tokens": PROBE_TOKENS, "ignore_eos": True}
    try:
        with connect_engine(url) as engine:
            return engine.generate(input_ids=PROBES, sampling_params=params, timeout=ANSWER_SECONDS)
    except FleetError as error:
        return error
