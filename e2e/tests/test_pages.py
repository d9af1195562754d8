"""Every code block of the pages says what runs it."""

from __future__ import annotations

import re

import pytest

from e2e.cluster.paths import REPOSITORY
from e2e.pages import NOT_RUN, Block, Runner, blocks_for, is_like, pages, parse_blocks, read_blocks

PAGE = """
```sh test=shell
echo 1
```

```text
1
```

1. A list.

   ```python
   if True:
       print()
   ```
   Words.

   ```text
   no output
   ```

```{toctree}
tests
```
```yaml skip=gpus
a: b
```
```text skip=other-fleet
c
```
"""


def test_parsed_blocks_have_their_place_text_and_output() -> None:
    blocks = list(parse_blocks(PAGE, "page.md"))
    assert [(str(block), block.language, block.text, block.output) for block in blocks] == [
        ("page.md:2", "sh", "echo 1\n", "1\n"),
        ("page.md:6", "text", "1\n", None),
        ("page.md:12", "python", "if True:\n    print()\n", None),
        ("page.md:18", "text", "no output\n", None),
        ("page.md:25", "yaml", "a: b\n", None),
        ("page.md:28", "text", "c\n", None),
    ]
    assert [block.runner for block in blocks] == [Runner.SHELL, None, Runner.PYTHON, None, None, None]


@pytest.mark.parametrize("info", ["", "sh", "bash", "sh test=python", "sh skip=lazy", "sh covered=x", "sh test=shell skip=gpus"])
def test_block_without_a_known_word_is_refused(info: str) -> None:
    (block,) = parse_blocks(f"```{info}\nmake x\n```\n", "page.md")
    with pytest.raises(ValueError, match=r"page\.md:1: the fence does not say"):
        _ = block.runner


@pytest.mark.parametrize(
    ("output", "shown", "expected"),
    [
        ("NAME  AGE\ndemo  2m16s\n", "NAME   AGE\ndemo   45s", True),
        ("a 17\nb\nc 0.5", "a 3\n...\nc 12.25", True),
        ("logs /tmp/x-p6y0/logs", "logs …/logs", True),
        ("logs /tmp/x-p6y0/logs", "logs /tmp/x-r3sp/logs", True),
        ("Ready 2/2", "Ready 2/2 more", False),
        ("Paused", "Active", False),
        ("a\nError", "a", False),
    ],
)
def test_output_is_compared_apart_from_numbers_and_dots(output: str, shown: str, expected: bool) -> None:
    assert is_like(output, shown) is expected


def test_every_fence_is_parsed() -> None:
    for page in pages():
        text = page.read_text()
        directives = len(re.findall(r"^ *```\{", text, re.MULTILINE))
        assert len(list(parse_blocks(text, page.name))) + directives == len(re.findall(r"^ *```", text, re.MULTILINE)) / 2, page


def test_every_block_says_what_runs_it() -> None:
    found = {block.runner for block in read_blocks()}
    assert found == {*Runner, None}
    assert {block.words["skip"] for block in read_blocks() if "skip" in block.words} == set(NOT_RUN)


def test_blocks_for_the_shared_fleet_change_nothing() -> None:
    harmless = re.compile(r"kubectl (-n \S+ )?(get|describe|logs|port-forward) |curl -s |sglang-rollout (plan|status) |  -d ")
    commands = [command for block in blocks_for(Runner.CLUSTER) for command in block.text.splitlines()]
    assert [command for command in commands if not harmless.match(command)] == []


COVERED = [block for block in read_blocks() if "covered" in block.words]


@pytest.mark.parametrize("block", COVERED, ids=str)
def test_block_is_covered_by_an_existing_function(block: Block) -> None:
    path, _, name = block.words["covered"].partition("::")
    assert re.search(rf"^(async )?def {name}\(", (REPOSITORY / path).read_text(), re.MULTILINE)
