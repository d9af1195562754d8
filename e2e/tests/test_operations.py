"""The pages for operations agree with the code on reasons, Events, alerts, messages, ports and requests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import yaml

from e2e.cluster.paths import REPOSITORY
from sglang_rollout.api.status import Reason
from sglang_rollout.overview.advice import ADVICE
from sglang_rollout.wire import ports
from sglang_rollout.wire.reasons import GateReason

OPERATIONS = REPOSITORY / "docs/operations"
CODE = REPOSITORY / "operator/sglang_rollout"
REASONS = {reason.value for reason in Reason}
QUOTED = {"didn't have free ports"}
"""Messages of Kubernetes' scheduler."""
EPHEMERAL_PORTS = {32767, 32768, 60999}
"""First and last, as Linux sets them, and the port before them."""
PROCESS_GROUP_PORTS = {1024, 29999, 30200, 65535}
"""Ends of the ranges on which engines of a process group connect to each other."""
SGLANG_PORTS = {*range(30101, 30107), 30113}
"""SGLang's own sockets, which it counts from the port at which the ranks of an engine meet."""


def read(page: str) -> str:
    return (OPERATIONS / page).read_text()


def section(text: str, heading: str) -> str:
    """Return what follows a heading, up to the next heading."""
    return re.split(r"^#+ ", text.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def code_spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def first_column(text: str) -> set[str]:
    """Return the inline code in the first column of all tables."""
    return code_spans("\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| ")))


def test_conditions_explains_every_reason_and_what_to_do() -> None:
    page = read("conditions.md")
    headings = re.findall(r"^### `(\w+)`$", page, re.MULTILINE)
    elsewhere = ("Other conditions", "Reasons of StoreReady", "Reasons in rows of status")
    named = set(headings).union(*(code_spans(section(page, heading)) for heading in elsewhere))
    assert REASONS - named == set()
    assert set(headings) - REASONS == set()
    assert [heading for heading in headings if "What to do: " not in section(page, f"`{heading}`")] == []


def test_status_command_gives_the_advice_of_conditions() -> None:
    page = read("conditions.md")
    headings = set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))
    assert set(ADVICE) == headings
    for reason, advice in ADVICE.items():
        written = section(page, f"`{reason}`").partition("What to do: ")[2].partition("\n")[0]
        assert re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", written).replace("`", "") == advice


def test_conditions_says_what_to_do_about_every_closed_gate() -> None:
    assert first_column(section(read("conditions.md"), "Reasons in `GET /fleet`")) == {reason.value for reason in GateReason} - {"Other"}


def test_conditions_lists_every_event() -> None:
    """Events that have the name of a reason of ``Ready`` need no row."""
    controller = "".join(file.read_text() for file in (CODE / "controller").rglob("*.py"))
    posted = set(re.findall(r'EventToPost\("\w+", "(\w+)"', controller))
    listed = first_column(section(read("conditions.md"), "Events"))
    assert posted - listed <= REASONS
    assert listed - posted <= REASONS


def test_alerts_has_a_runbook_for_every_alert() -> None:
    groups = yaml.safe_load((REPOSITORY / "examples/monitoring/alerts.yaml").read_text())["spec"]["groups"]
    severities = {rule["alert"]: rule["labels"]["severity"].capitalize() for group in groups for rule in group["rules"]}
    page = read("alerts.md")
    assert {heading: section(page, heading).split(":")[0].strip() for heading in re.findall(r"^## (.*)$", page, re.MULTILINE)} == severities


def strings_of_the_code() -> Iterator[str]:
    """Yield every string of the code, with a NUL for each value that it formats, and the templates of haproxy."""
    for file in CODE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for file in (CODE / "proxy/templates").iterdir():
        yield file.read_text()


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    """A page writes … for a value. The parts between values may come from several strings."""
    messages = first_column(read("troubleshooting.md").partition("## Symptoms without a message")[0]) - QUOTED
    code = list(strings_of_the_code())
    parts = {part.strip() for message in messages for part in message.split("…")} - {""}
    assert len(parts) > 40
    assert {part for part in parts if not any(part in text for text in code)} == set()


def test_network_names_every_port() -> None:
    known = {value for name, value in vars(ports).items() if name.endswith("_PORT")}
    named = {int(number) for number in re.findall(r"\b\d{4,5}\b", read("network.md"))}
    assert named - EPHEMERAL_PORTS - PROCESS_GROUP_PORTS - SGLANG_PORTS == known


def rendered_resources() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, request of CPU, and request and limit of memory of each container of a rollout with defaults, and of the operator."""
    found: list[tuple[str, dict[str, dict[str, str]]]] = []
    pods = (
        live["spec"]["template"]["spec"]
        for live in yaml.safe_load_all((REPOSITORY / "operator/tests/golden/out/minimal-cpu.yaml").read_text())
        if live["kind"] in {"StatefulSet", "Deployment"}
    )
    for pod in pods:
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            if container["name"] != "engine":
                found.append((container["name"], container["resources"]))
    found.append(("operator", yaml.safe_load((REPOSITORY / "charts/sglang-rollout-operator/values.yaml").read_text())["resources"]))
    for name, resources in found:
        requests = resources["requests"]
        yield name, (requests["cpu"], f"{requests['memory']}, limit {resources['limits']['memory']}")


def test_sizing_has_the_requests_and_limits_of_the_containers() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in read("sizing.md").splitlines() if line.startswith("| ")]
    listed = {row[1]: (row[2], row[3]) for row in rows if len(row) == 5}
    rendered = dict(rendered_resources())
    assert set(rendered) == {"gate", "agent", "smg", "front", "coordinator", "batches", "operator"}
    assert {name: listed.get(name) for name in rendered} == rendered
