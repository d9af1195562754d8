"""A weight push through the fleet's URL against the bare gloo broadcast of the same bytes to the same two engines.

    python -m bench.push [--rounds 7]

Both ways move a 197 MB model (99 M parameters, bfloat16) in the same flattened buckets over the same kind of group. The bare way calls
SGLang's own control API on each engine, in parallel threads; the fleet way is ``Fleet.push``. What is compared:

- *transfer*: only the buckets, each from its assembly to the replies of all engines;
- *whole*: pause, begin, buckets, end, continue (bare) against ``Fleet.push`` from call to return, which also proves what every engine
  holds, records the version and opens the gates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from bench.common import local_fleet, machine, save
from e2e.engine import environment

AIM = 1.3
REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = ("--dtype", "bfloat16", "--hidden", "1024", "--layers", "10", "--seed", "1")


def measure(url: str, engines: list[str], model: Path, rounds: int, bucket_mib: int) -> dict[str, list[dict[str, float]]]:
    """Run the worker, which needs torch, in the engines' environment."""
    variables = environment.environment_variables()
    variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "operator"), str(REPOSITORY), variables["PYTHONPATH"]])
    worker = [str(environment.python(make=False)), "-m", "bench.push_worker"]
    options = ["--url", url, "--engines", *engines, "--model", str(model), "--rounds", str(rounds), "--bucket-mib", str(bucket_mib)]
    done = subprocess.run([*worker, *options], env=variables, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=1200, check=False)
    if done.returncode:
        raise SystemExit("bench.push_worker failed; its error is above.")
    measured: dict[str, list[dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> int:
    """Measure, print the ratios, write the result. Exit code 0 also above the aim: a benchmark measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=256)
    options = parser.parse_args()
    facts = machine()
    model = environment.model(*MODEL)
    with local_fleet(2, model=model) as fleet:
        measured = measure(fleet.url, [engine.url for engine in fleet.engines], model, options.rounds, options.bucket_mib)
    bare, fleet_way = measured["bare"], measured["fleet"]
    ratios = {key: median(row[key] for row in fleet_way) / median(row[key] for row in bare) for key in ("transfer", "whole")}
    size = fleet_way[0]["bytes"] / 1e6
    print(f"{size:.0f} MB to 2 engines, median of {options.rounds} rounds, in turns:")
    for key, ratio in ratios.items():
        times = f"bare {median(r[key] for r in bare):.0f} ms, through the URL {median(r[key] for r in fleet_way):.0f} ms"
        print(f"  {key:<9} {times}: ratio {ratio:.2f} (aim <= {AIM})")
    save("push", facts, {"megabytes": size, "bucket_mib": options.bucket_mib, "aim": AIM, "ratios": ratios, "rounds": measured})
    return 0


if __name__ == "__main__":
    sys.exit(main())
