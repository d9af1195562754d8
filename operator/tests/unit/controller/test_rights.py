"""The operator has the rights that the documentation lists, and no others."""

from __future__ import annotations

import re

from sglang_rollout.controller.decide.allowed import HARMLESS_CAPABILITIES
from sglang_rollout.controller.rights import CLUSTER_RULES, OPERATOR_RULES
from tests.support.paths import CHARTS, REPOSITORY

ROW = re.compile(r"\| (core|`[a-z0-9.-]+`) \| `([a-z/]+)` \| ([a-z, ]+) \| .+ \|")
POLICY = CHARTS / "sglang-rollout-operator/templates/admission-policy.yaml"


def granted() -> dict[tuple[str, str], set[str]]:
    """Return the verbs by API group and resource."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in [*OPERATOR_RULES, *CLUSTER_RULES]:
        assert set(rule) == {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert (group, resource) not in found, "one rule per resource"
                found[group, resource] = set(rule["verbs"])
    return found


def test_rights_are_those_of_the_documentation() -> None:
    text = (REPOSITORY / "docs/operations/permissions.md").read_text()
    documented = {
        ("" if group == "core" else group.strip("`"), resource): set(verbs.split(", ")) for group, resource, verbs in ROW.findall(text)
    }
    assert granted() == documented


def test_secrets_cannot_be_listed() -> None:
    assert granted()["", "secrets"] == {"get", "create", "patch"}


def test_operator_grants_no_rights_in_the_cluster() -> None:
    """RBAC then refuses each Role that has a right which the operator lacks, such as listing namespaces."""
    for (group, resource), verbs in granted().items():
        assert resource not in {"clusterroles", "clusterrolebindings"}
        assert "*" not in {group, resource, *verbs}
        assert not verbs & {"bind", "escalate", "impersonate", "deletecollection"}


def test_policy_has_the_same_capabilities() -> None:
    """The template is text, so that it reads like every other template."""
    found = re.search(r"all\(a, a in \[([^\]]+)\]", POLICY.read_text())
    assert found is not None
    assert set(re.findall(r"'([A-Z_]+)'", found.group(1))) == HARMLESS_CAPABILITIES
