"""``sglang-rollout plan`` and ``sglang-rollout render``: the operator's next steps and its objects, from files."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.drift import stamp
from sglang_rollout.controller.preview import plan_command, render_command
from sglang_rollout.controller.render import names, render_all
from tests.unit.controller.support.worlds import SETTINGS, cr

Object = dict[str, Any]
IMAGES = [f"--coordinator-image={SETTINGS.coordinator_image}", f"--router-image={SETTINGS.router_image}"]


HEAD = "apiVersion: rollout.sglang.io/v1alpha1\nkind: SGLangRollout\nmetadata: {name: demo}\n"


@pytest.fixture
def rollout() -> Object:
    """An SGLangRollout as a user writes it: without UID."""
    written = cr(replicas=2)
    written["metadata"] = {"name": "demo"}
    return written


def live_objects() -> list[Object]:
    """The objects of the applied rollout, with one ready pod per engine, as the API server returns them."""
    stored = cr(replicas=2)
    children = [stamp(child) for child in render_all(SGLangRollout.model_validate(stored), SETTINGS, token="t0ken")]
    objects = [copy.deepcopy(child) for child in children]
    for child in objects:
        child["metadata"] |= {"generation": 1, "uid": f"uid-{child['metadata']['name']}"}
        child["status"] = {"observedGeneration": 1, "readyReplicas": 1, "replicas": 1}
        if child["kind"] == "StatefulSet":
            labels = child["spec"]["template"]["metadata"]["labels"]
            metadata = {"name": names.engine_pod(child["metadata"]["name"]), "namespace": "default", "labels": labels, "uid": "uid-pod"}
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": status})
    stranger = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "other", "namespace": "default"}}
    return [stored, stranger, *objects]


def preview(tmp_path: Path, rollout: Object, live: list[Object] | None = None) -> list[str]:
    """Run the command and return the lines that it prints."""
    arguments = [f"--file={tmp_path / 'cr.yaml'}", *IMAGES]
    (tmp_path / "cr.yaml").write_text(yaml.safe_dump(rollout))
    if live is not None:
        (tmp_path / "live.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": live}))
        arguments.append(f"--live={tmp_path / 'live.yaml'}")
    result = CliRunner().invoke(plan_command, arguments)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_a_new_rollout_creates_every_child_and_engines_last(tmp_path: Path, rollout: Object) -> None:
    lines = preview(tmp_path, rollout)
    assert all(line.startswith("apply ") and line.endswith("does not exist") for line in lines)
    assert [line.split()[1:3] for line in lines[-2:]] == [["StatefulSet", "demo-engine-0"], ["StatefulSet", "demo-engine-1"]]


def test_an_unchanged_rollout_has_no_steps(tmp_path: Path, rollout: Object) -> None:
    lines = preview(tmp_path, rollout, live_objects())
    assert lines == ["nothing to do: every child is as the spec says"]


def test_live_objects_without_their_rollout_are_refused(tmp_path: Path, rollout: Object) -> None:
    (tmp_path / "cr.yaml").write_text(yaml.safe_dump(rollout))
    (tmp_path / "live.yaml").write_text(yaml.safe_dump_all(live_objects()[1:]))
    result = CliRunner().invoke(plan_command, [f"--file={tmp_path / 'cr.yaml'}", f"--live={tmp_path / 'live.yaml'}"])
    assert result.exit_code == 1
    assert "add sglr to kubectl get" in result.output


def test_a_new_image_is_applied_before_a_pod_is_deleted(tmp_path: Path, rollout: Object) -> None:
    rollout["spec"]["engine"]["image"] = "example.org/engine:2"
    lines = preview(tmp_path, rollout, live_objects())
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["apply", "ConfigMap", "demo-intent"],
        ["apply", "StatefulSet", "demo-engine-0"],
        ["apply", "StatefulSet", "demo-engine-1"],
    ]
    assert lines[-1] == "look again in 10 s"


def test_fewer_replicas_delete_the_highest_index(tmp_path: Path, rollout: Object) -> None:
    rollout["spec"]["replicas"] = 1
    lines = preview(tmp_path, rollout, live_objects())
    assert [line.split() for line in lines if line.startswith("delete")] == [
        ["delete", "StatefulSet", "demo-engine-1", "not", "wanted", "any", "more"]
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold one SGLangRollout, and holds 0"),
        ("kind: SGLangRollout\nmetadata: {}\n", "holds a SGLangRollout without metadata.name"),
        ("- a\n", "holds a document that is no Kubernetes object"),
        ("a: [", "is not valid YAML"),
        ("kind: SGLangRollout\nmetadata: {name: demo}\nspec: {}\n", "apiVersion: must be rollout.sglang.io/v1alpha1"),
        (f"{HEAD}spec: {{}}\n", "spec.model: required"),
        (f"{HEAD}spec: {{model: {{path: m}}, engine: {{image: i}}, replica: 3}}\n", "spec.replica: unknown field"),
        (f"{HEAD}spec: {{model: {{path: m}}, engine: {{image: i, eplb: true}}}}\n", "spec.engine: "),
    ],
)
def test_an_unusable_file_is_refused_with_its_reason(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cr.yaml").write_text(text)
    for command in (plan_command, render_command):
        result = CliRunner().invoke(command, [f"--file={tmp_path / 'cr.yaml'}"])
        assert result.exit_code == 1
        assert message in result.output
        assert "Traceback" not in result.output


def test_render_prints_every_child_as_the_operator_applies_it(tmp_path: Path, rollout: Object) -> None:
    (tmp_path / "cr.yaml").write_text(yaml.safe_dump(rollout))
    result = CliRunner().invoke(render_command, [f"--file={tmp_path / 'cr.yaml'}", *IMAGES])
    assert result.exit_code == 0, result.output
    named = {**rollout, "metadata": {"name": "demo", "namespace": "default"}}
    assert list(yaml.safe_load_all(result.output)) == render_all(SGLangRollout.model_validate(named), SETTINGS)


def in_namespace(objects: list[Object], namespace: str) -> list[Object]:
    return [{**obj, "metadata": {**obj["metadata"], "namespace": namespace}} for obj in objects]


def test_the_namespace_is_that_of_the_live_object(tmp_path: Path, rollout: Object) -> None:
    """With ``default``, every child would seem to be missing."""
    assert preview(tmp_path, rollout, in_namespace(live_objects(), "ml"))[0] != "nothing to do: every child is as the spec says"
    lines = preview(tmp_path, rollout, in_namespace(live_objects(), "ml"))
    assert not [line for line in lines if line.endswith("does not exist")], lines


@pytest.mark.parametrize(
    ("own", "words", "places", "message"),
    [
        ("other", [], ["ml"], "SGLangRollout demo is in the namespace other, and the live objects are in ml"),
        (None, ["--namespace=other"], ["ml"], "SGLangRollout demo is in the namespace other, and the live objects are in ml"),
        (None, [], ["ml", "rl"], "in the namespaces ml, rl: add --namespace"),
        ("ml", ["--namespace=rl"], ["ml"], "names the namespace ml, and --namespace names rl"),
    ],
)
def test_a_doubtful_namespace_is_refused(
    tmp_path: Path, rollout: Object, own: str | None, words: list[str], places: list[str], message: str
) -> None:
    rollout["metadata"] |= {"namespace": own} if own else {}
    (tmp_path / "cr.yaml").write_text(yaml.safe_dump(rollout))
    live = [obj for place in places for obj in in_namespace(live_objects(), place)]
    (tmp_path / "live.yaml").write_text(yaml.safe_dump_all(live))
    result = CliRunner().invoke(plan_command, [f"--file={tmp_path / 'cr.yaml'}", f"--live={tmp_path / 'live.yaml'}", *words])
    assert result.exit_code == 1
    assert message in result.output


def test_rules_about_changes_compare_with_the_live_object(tmp_path: Path, rollout: Object) -> None:
    rollout["spec"] |= {"scheduling": {"queueName": "q"}}
    (tmp_path / "cr.yaml").write_text(yaml.safe_dump(rollout))
    (tmp_path / "live.yaml").write_text(yaml.safe_dump_all(live_objects()))
    result = CliRunner().invoke(plan_command, [f"--file={tmp_path / 'cr.yaml'}", f"--live={tmp_path / 'live.yaml'}"])
    assert result.exit_code == 1
    assert "queueName" in result.output


def test_commands_need_no_library_of_the_operator(tmp_path: Path, rollout: Object) -> None:
    (tmp_path / "cr.yaml").write_text(yaml.safe_dump(rollout))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['kopf', 'kubernetes', 'aiohttp', 'prometheus_client']));"
        "from sglang_rollout.cli import main; main(sys.argv[1:])"
    )
    for command in ("plan", "render"):
        words = [sys.executable, "-c", code, command, "-f", str(tmp_path / "cr.yaml")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
