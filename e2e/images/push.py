"""Bring images and chart to a registry that a cluster can pull from: ``make push REGISTRY=registry.example.org/rollout``.

The tag and the chart's version contain the hash of all that is pushed, so a cluster never runs an older image of the same name.
"""

import os
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import yaml

from e2e.cluster.paths import REPOSITORY, content_key, files_below
from e2e.cluster.say import LabError, step
from e2e.images.archives import build
from e2e.images.builder import choose
from e2e.images.catalog import LOCAL, Place, Version
from e2e.kube import SYSTEM

CHART = REPOSITORY / "charts" / "sglang-rollout-operator"
_REGISTRY = re.compile(r"(?P<host>[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?P<port>:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_OWN_MACHINE = ("localhost", "127.0.0.1", "[::1]")


def check_registry(registry: str) -> None:
    """Check the name of a registry, and that it answers, before anything is built.

    Raises:
        LabError: The name cannot begin an image's name, or nothing there speaks the protocol of registries.
    """
    if not _REGISTRY.fullmatch(registry):
        raise LabError(
            f"REGISTRY={registry} is not the beginning of an image's name. "
            "Write host, port and path, without https:// and in lower case: registry.example.org/rollout"
        )
    url = f"{'http' if _is_plain(registry) else 'https'}://{registry.partition('/')[0]}/v2/"
    try:
        with urllib.request.urlopen(url, timeout=20):
            return
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):  # it wants a login, which docker and buildah have of their own
            return
        raise LabError(f"{url} answers HTTP {error.code}, so it is no registry. Correct REGISTRY.") from error
    except OSError as error:
        more = " For a registry without TLS, set PLAIN_HTTP=1." if url.startswith("https") else ""
        raise LabError(
            f"{url} does not answer: {getattr(error, 'reason', error)}. Correct REGISTRY, or start the registry.{more}"
        ) from error


def publish(registry: str) -> Place:
    """Build missing images, push all of them and the chart, and return where the images are."""
    if not shutil.which("helm"):
        raise LabError("helm is not on PATH: https://helm.sh")
    check_registry(registry)
    return push(registry, build([]))


def push(registry: str, built: Sequence[Version]) -> Place:
    """Push these images and the chart, and return where the images are.

    Raises:
        LabError: A push failed; the message has the end of its log.
    """
    key = content_key(files_below(CHART), *(version.key for version in built))[:12]
    place = Place(registry, f"dev-{key}")
    for version in built:
        reference = place.reference(version.image.name)
        with step(f"push {reference}"):
            choose().push(version.image, version.archive, reference, plain_http=_is_plain(registry))
    with step(f"push the chart {_chart_version(place)}"):
        _push_chart(place)
    return place


def helm_command(place: Place) -> list[str]:
    """Return the command that installs the pushed chart with the pushed images, or upgrades to them."""
    chart = ["sglang-rollout-operator", f"oci://{place.registry}/charts/sglang-rollout-operator", "--version", _chart_version(place)]
    images = ["--set", f"images.registry={place.registry}", "--set-string", f"images.tag={place.tag}"]
    return ["helm", "upgrade", "--install", *chart, *_plain_flag(place.registry), "-n", SYSTEM, "--create-namespace", "--wait", *images]


def use_images(text: str, place: Place) -> str:
    """Return a manifest of the examples with the images of ``place``."""
    return re.sub(
        re.escape(f"{LOCAL.registry}/") + r"([a-z-]+)" + re.escape(f":{LOCAL.tag}"), lambda found: place.reference(found[1]), text
    )


def _is_plain(registry: str) -> bool:
    host = _REGISTRY.match(registry)
    return os.environ.get("PLAIN_HTTP") == "1" or (host is not None and host["host"] in _OWN_MACHINE)


def _plain_flag(registry: str) -> list[str]:
    return ["--plain-http"] if _is_plain(registry) else []


def _chart_version(place: Place) -> str:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    return f"{version}-{place.tag.replace('-', '.')}"


def _push_chart(place: Place) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _helm("package", str(CHART), "--version", _chart_version(place), "-d", scratch)
        (archive,) = Path(scratch).glob("*.tgz")
        _helm("push", str(archive), f"oci://{place.registry}/charts", *_plain_flag(place.registry))


def _helm(*words: str) -> None:
    done = subprocess.run(["helm", *words], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise LabError(f"helm {words[0]} failed: {done.stderr.strip()[-500:]}")
