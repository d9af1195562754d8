"""Draw reward curves of train.py in one image.

    python plot.py pushed.json frozen.json --out reward.png

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    """Read the curves and write the image."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curves", type=Path, nargs="+", help="JSON files written by train.py --out")
    parser.add_argument("--out", type=Path, default=Path("reward.png"))
    options = parser.parse_args()
    try:
        import matplotlib  # noqa: PLC0415 - only needed here, and absent in most images
    except ModuleNotFoundError:
        parser.error("matplotlib is not installed here; run: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - after the choice of its backend

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for path in options.curves:
        curve = json.loads(path.read_text())
        pushed = "weights pushed every step" if curve["push"] else "no pushes"
        axes.plot(
            [row["step"] for row in curve["rows"]],
            [row["reward"] for row in curve["rows"]],
            color="tab:blue" if curve["push"] else "tab:gray",
            label=f"{pushed} (seed {curve['seed']})",
        )
    axes.set(xlabel="step", ylabel="reward (share of target tokens)", ylim=(0, 1), title="Policy gradient through one fleet URL")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(options.out, dpi=150)
    print(options.out)


if __name__ == "__main__":
    main()
