"""Which pods a namespace admits that enforces a level of Pod Security, and the table of docs/operations/containers.md about it.

All golden specs are applied to namespaces that enforce each level. ``UPDATE_GOLDEN=1`` writes the table.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.fixtures import kubernetes_api  # noqa: F401 - a fixture
from e2e.cluster.say import wait_until

from sglang_rollout.controller.decide.view import build_fleet_view
from sglang_rollout.controller.render import render_all
from sglang_rollout.controller.render.common import Settings
from tests.support.paths import DOCS, GOLDEN_INPUTS

pytestmark = pytest.mark.controlplane

PAGE = DOCS / "operations/containers.md"
SETTINGS = Settings(coordinator_image="example.org/coordinator:1", router_image="example.org/router:1")
SPECS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(GOLDEN_INPUTS.glob("*.yaml"))}
LEVELS = ("restricted", "baseline", "privileged")
NEEDS_OTHER_OBJECTS = ("serviceAccountName", "priorityClassName", "priority", "runtimeClassName", "overhead")
"""Fields of a pod that name objects which these namespaces lack. Pod Security reads none of them."""
FIELDS = {
    "runAsNonRoot != true": "the user of `engine.image`, unless `podTemplate` sets another",
    "unrestricted capabilities": "containers that `podTemplate` and `router.podTemplate` add",
    "allowPrivilegeEscalation != false": "containers that `podTemplate` and `router.podTemplate` add",
    "seccompProfile": "`podTemplate`",
    "non-default capabilities": "`engine.rdma`, and capabilities that `podTemplate` adds",
    "host namespaces": "`engine.network.hostNetwork`; hostIPC in `podTemplate`, which `mode: Hybrid` and `Colocated` need",
    "hostPort": "`engine.network.hostNetwork`",
    "hostPath volumes": "`model.volume.hostPath`, `engine.cache.hostPath`, and volumes in `podTemplate`",
}
"""Fields of the spec behind each finding of Pod Security."""
STRICTER = {"restricted volume types": "hostPath volumes", "unrestricted capabilities": "non-default capabilities"}
"""Findings of the level restricted that include a finding of the level baseline."""


@pytest.fixture(scope="module")
def api(kubernetes_api: ControlPlane) -> ControlPlane:  # noqa: F811
    for level in LEVELS:
        kubernetes_api.kubectl("create", "namespace", f"pod-security-{level}")
        kubernetes_api.kubectl("label", "namespace", f"pod-security-{level}", f"pod-security.kubernetes.io/enforce={level}")
        account = partial(kubernetes_api.kubectl, "get", "serviceaccount", "default", "-n", f"pod-security-{level}", check=False)
        wait_until(partial(_succeeds, account), seconds=60, what=f"the namespace of {level} has no ServiceAccount", every=0.2)
    return kubernetes_api


def _succeeds(command: Callable[[], CompletedProcess[str]]) -> bool:
    return command().returncode == 0


def pods(name: str, cr: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return component and pod of each workload of a golden spec."""
    fleet = build_fleet_view(cr, [], [])
    assert fleet.rollout is not None, fleet.invalid
    for made in render_all(fleet.rollout, SETTINGS, "t0ken", avoided=fleet.avoided_nodes):
        template = made.get("spec", {}).get("template")
        if template is None:
            continue
        component = made["metadata"]["labels"]["app.kubernetes.io/component"]
        spec = {key: value for key, value in template["spec"].items() if key not in NEEDS_OTHER_OBJECTS}
        yield component, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-{component}"}, "spec": spec}


@pytest.fixture(scope="module")
def findings(api: ControlPlane) -> dict[str, dict[str, dict[str, set[str]]]]:
    """Return the refusals: by level and finding of Pod Security, the golden specs of each component."""
    made = {pod["metadata"]["name"]: (name, component, pod) for name, cr in SPECS.items() for component, pod in pods(name, cr)}
    text = "---\n".join(yaml.safe_dump(pod) for _, _, pod in made.values())
    found: dict[str, dict[str, dict[str, set[str]]]] = {}
    for level in LEVELS:
        done = api.kubectl("create", "--dry-run=server", "-n", f"pod-security-{level}", "-f", "-", stdin=text, check=False)
        seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        refused = re.findall(r'pods "([^"]+)" is forbidden: violates PodSecurity "[^"]+": (.*)', done.stderr)
        assert len(refused) == done.stderr.count("Error from server"), done.stderr
        assert len(refused) + len(done.stdout.splitlines()) == len(made)
        for pod, problems in refused:
            spec, component, _ = made[pod]
            for finding in re.findall(r"(?:^|, )([^(]+) \([^()]*\)", problems):
                seen[finding][component].add(spec)
        found[level] = seen
    return found


def test_nothing_is_refused_by_a_privileged_namespace(findings: dict[str, Any]) -> None:
    assert not findings["privileged"]


def test_the_operators_own_router_is_admitted_by_every_level(findings: dict[str, Any]) -> None:
    refused = {spec for seen in findings.values() for components in seen.values() for spec in components.get("router", ())}
    assert refused == {"router"}, "its overlay adds a container"


def test_an_engine_that_names_a_user_is_admitted_by_a_restricted_namespace(findings: dict[str, Any]) -> None:
    assert not any("non-root" in specs for components in findings["restricted"].values() for specs in components.values())


def test_a_plain_engine_is_admitted_by_a_baseline_namespace(findings: dict[str, Any]) -> None:
    assert not any("minimal-cpu" in specs for components in findings["baseline"].values() for specs in components.values())


def rows(findings: dict[str, Any]) -> Iterator[tuple[str, str, set[str]]]:
    """Return each finding, the level that the pod needs instead, and the golden specs."""
    specs = {level: {finding: set().union(*found.values()) for finding, found in seen.items()} for level, seen in findings.items()}
    for finding, seen in sorted(specs["restricted"].items()):
        if finding not in specs["baseline"] and (only := seen - specs["baseline"].get(STRICTER.get(finding, ""), set())):
            yield finding, "baseline", only
    for finding, seen in sorted(specs["baseline"].items()):
        yield finding, "privileged", seen


def table(findings: dict[str, Any]) -> str:
    lines = ["| finding of Pod Security | needs | fields of the spec | golden specs |", "|---|---|---|---|"]
    for finding, level, specs in rows(findings):
        shown = "all but " + ", ".join(sorted(SPECS.keys() - specs)) if len(specs) > len(SPECS) / 2 else ", ".join(sorted(specs))
        lines.append(f"| `{finding}` | {level} | {FIELDS[finding]} | {shown} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table(findings: dict[str, Any]) -> None:
    before, rest = PAGE.read_text().split("<!-- pod-security -->\n", 1)
    _, after = rest.split("<!-- end -->\n", 1)
    wanted = f"{before}<!-- pod-security -->\n{table(findings)}<!-- end -->\n{after}"
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted
