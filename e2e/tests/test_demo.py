"""What the demo says before and after it runs, and the commands of pages that a reader pastes together."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator

import pytest

from e2e.cluster.paths import REPOSITORY
from e2e.demo import describe_next_steps
from e2e.pages import Block, read_blocks

README = (REPOSITORY / "README.md").read_text()


def without_patience(text: str) -> Iterator[str]:
    """Yield the commands that call a port which ``kubectl port-forward`` in the line above may not have opened yet."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    for line, following in itertools.pairwise(lines):
        is_patient = following.startswith("curl ") and "--retry-connrefused" in following
        if "port-forward" in line and line.endswith("&") and not is_patient:
            yield following


def test_the_rule_finds_an_impatient_command() -> None:
    forward = "kubectl port-forward svc/demo-router 30000 > /dev/null &\n"
    assert list(without_patience(f"{forward}curl -s localhost:30000/fleet\n")) == ["curl -s localhost:30000/fleet"]
    assert not list(without_patience(f"{forward}curl -s --retry 10 --retry-connrefused localhost:30000/fleet\n"))


@pytest.mark.parametrize("block", [block for block in read_blocks() if "port-forward" in block.text], ids=str)
def test_a_forward_and_the_call_after_it_can_be_pasted_together(block: Block) -> None:
    assert not list(without_patience(block.text))


def test_the_last_lines_of_the_demo_can_be_pasted_together() -> None:
    text = describe_next_steps({"KUBECONFIG": "/tmp/config", "PATH": "/programs:/bin"})
    assert not list(without_patience(text))
    commands = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    assert commands[0] == "export KUBECONFIG=/tmp/config PATH=/programs:$PATH"
    assert commands[-1] == "make clean"
    assert subprocess.run(["bash", "-n", "-c", "\n".join(commands)], check=False).returncode == 0
    assert "export" not in describe_next_steps({}), "the user's own context needs none"


@pytest.mark.parametrize("figure", ["about 3.4 GB", "about 18 minutes on two cores", "2 to 4 minutes", "about 3.0 GB"])
def test_the_demo_begins_with_the_figures_of_the_readme(figure: str) -> None:
    script = (REPOSITORY / "e2e/demo.sh").read_text()
    before = script[: script.index("part 1 ")]
    assert figure in before
    assert figure in README


@pytest.mark.parametrize(("cluster", "said"), [("lab", "3.4 GB"), ("none", "3.0 GB"), ("current", "builds the images")])
def test_each_kind_of_demo_says_what_a_first_run_downloads(cluster: str, said: str) -> None:
    script = (REPOSITORY / "e2e/demo.sh").read_text()
    begin = script[script.index("# The sizes") : script.index("part() ")]
    shown = subprocess.run(["bash", "-euc", f"CLUSTER={cluster}\n{begin}"], capture_output=True, text=True, check=True).stderr
    assert re.fullmatch(rf"A first run [^\0]*{said}[^\0]*\.\n", shown)
