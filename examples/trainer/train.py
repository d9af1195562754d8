"""A policy-gradient loop on a rollout fleet: sample through the fleet's URL, learn, push the weights, repeat.

    python train.py --url http://demo-router:30000 --model /models/tiny

The reward of a sample is the share of its tokens that belong to a target set. The reward rises because every step
samples from the policy of the previous step. With --no-push the engines keep their first weights, and the reward does
not rise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from checks import CheckFailed, EngineChecks
from policy import Policy

from sglang_rollout.trainer import Fleet, FleetError, Sample, connect

HEADER = f"{'step':>4} {'reward':>7} {'version':>8} {'gap':>8} {'generate':>9} {'train':>7} {'push':>7} {'check':>7}   (ms)"


@dataclass(frozen=True)
class Row:
    """One line of the progress table."""

    step: int
    reward: float
    version: str
    gap: float
    generate_ms: float
    train_ms: float
    push_ms: float
    check_ms: float

    def __str__(self) -> str:
        times = f"{self.generate_ms:>9.0f} {self.train_ms:>7.0f} {self.push_ms:>7.0f} {self.check_ms:>7.0f}"
        return f"{self.step:>4} {self.reward:>7.3f} {self.version:>8} {self.gap:>8.4f} {times}"


class Stopwatch:
    """Measures laps in milliseconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        """Return the milliseconds since the last lap, or since the start."""
        last, self._last = self._last, time.monotonic()
        return (self._last - last) * 1000


class Trainer:
    """The training loop. Step k samples from version k-1 and pushes version k."""

    def __init__(self, fleet: Fleet, policy: Policy, options: argparse.Namespace) -> None:
        self._fleet = fleet
        self._policy = policy
        self._options = options
        self._checks = EngineChecks(fleet, policy) if options.check and options.push else None
        self._expected = self._start()
        self.rows: list[Row] = []

    def run(self) -> None:
        """Run all steps, and print one line per step."""
        print(HEADER, flush=True)
        for step in range(1, self._options.steps + 1):
            self.rows.append(self._step(step))
            print(self.rows[-1], flush=True)
        if self._checks:
            print(
                f"checked on every engine after each of {self._checks.pushes} pushes: greedy tokens equal the policy's; "
                f"{self._checks.changed} pushes changed them"
            )

    def _start(self) -> str:
        """Make the fleet serve the model's own weights, and return the label of this version.

        So every run starts from the same policy: weights of an earlier trainer are replaced.
        """
        committed = self._fleet.document().committed
        if committed.is_base and not self._options.push:
            return committed.label
        self._fleet.open_group(self._options.backend, host=self._options.host)
        if committed.is_base:
            return committed.label
        return self._fleet.push(self._policy.model.state_dict(), version=0).version

    def _step(self, step: int) -> Row:
        watch = Stopwatch()
        prompts = self._policy.prompts(self._options.batch)
        params = {"temperature": 1.0, "max_new_tokens": self._options.tokens, "ignore_eos": True}
        samples = self._fleet.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        self._check_samples(samples)
        generate_ms = watch.lap()
        learned = self._policy.train(prompts, [sample.output_ids for sample in samples], [sample.logprobs or [] for sample in samples])
        train_ms = watch.lap()
        sampled_from = self._expected
        if self._options.push:
            # An engine that ends in the middle of a push must not end the training.
            self._fleet.push(self._policy.model.state_dict(), version=step, retries=2)
            self._expected = str(step)
        push_ms = watch.lap()
        if self._checks:
            self._checks.after_push(self._policy, step)
        return Row(step, learned.reward, sampled_from, learned.gap, generate_ms, train_ms, push_ms, watch.lap())

    def _check_samples(self, samples: list[Sample]) -> None:
        """Check that every token was sampled from the version that this step trains."""
        labels = {span.version for sample in samples for span in sample.weight_versions}
        if labels != {self._expected}:
            raise CheckFailed(f"The samples carry version {sorted(labels)}; the committed version is {self._expected!r}.")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the fleet's URL: http://<name>-router:30000")
    parser.add_argument("--model", required=True, help="folder of the model that the engines serve")
    parser.add_argument("--backend", help="torch.distributed backend of the pushes [default: the fleet's]")
    parser.add_argument("--host", help="address at which the engines reach this trainer [default: that of the route to the fleet]")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=48, help="samples per step")
    parser.add_argument("--tokens", type=int, default=12, help="tokens per sample")
    parser.add_argument("--learning-rate", type=float, default=1.4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wait", type=float, default=600, help="seconds to wait for a healthy fleet")
    parser.add_argument("--no-push", dest="push", action="store_false", help="do not push: the reward does not rise")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="sample from each engine after a push")
    parser.add_argument("--out", type=Path, help="JSON file for the curve; - prints a line CURVE {…}")
    return parser.parse_args(argv)


def main() -> int:
    """Train, and return 1 after an error of the fleet or of a check."""
    options = arguments()
    torch.set_num_threads(1)  # leave the other cores to the engines
    policy = Policy(options.model, seed=options.seed, learning_rate=options.learning_rate)
    started = time.monotonic()
    try:
        with connect(options.url, timeout=options.wait) as fleet:
            document = fleet.document()
            names = ", ".join(member.name for member in document.members)
            print(f"fleet {document.name}: {names}; world size {document.world_size}, committed {document.committed}")
            trainer = Trainer(fleet, policy, options)
            trainer.run()
    except (FleetError, CheckFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    first, last = trainer.rows[0].reward, trainer.rows[-1].reward
    seconds = time.monotonic() - started
    print(f"reward {first:.3f} -> {last:.3f} in {len(trainer.rows)} steps, {seconds:.0f} s, pushes {'on' if options.push else 'off'}")
    if options.out:
        curve = {"push": options.push, "seed": options.seed, "seconds": seconds, "rows": [asdict(row) for row in trainer.rows]}
        if str(options.out) == "-":
            print(f"CURVE {json.dumps(curve)}")
        else:
            options.out.write_text(json.dumps(curve, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
