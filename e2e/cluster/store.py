"""Images of the nodes. Each content is imported once from its archive, and stays in the cache."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tenacity import retry, retry_if_exception_message, stop_after_attempt

from e2e.cluster import archive, nodeconf, nodes
from e2e.cluster.paths import content_key, lab_root
from e2e.cluster.say import LabError, say, step, wait_until

_IMPORT_SECONDS = 900.0


class Image(NamedTuple):
    """An image to load: the name that pods use, the archive (OCI or docker save), and a key of its content."""

    reference: str
    archive: Path
    key: str


def parse(words: list[str]) -> list[Image]:
    """Read images from words, three for each."""
    if len(words) % 3:
        raise LabError("load needs three words for each image: the reference, the archive's path, a key of its content")
    return [Image(words[i], Path(words[i + 1]), words[i + 2]) for i in range(0, len(words), 3)]


def full_name(reference: str) -> str:
    """Return the name under which the kubelet looks for ``reference``."""
    first = reference.split("/", 1)[0]
    if "/" in reference and ("." in first or ":" in first or first == "localhost"):
        name = reference
    else:
        name = f"docker.io/{reference}" if "/" in reference else f"docker.io/library/{reference}"
    return name if ":" in name.rsplit("/", 1)[-1] or "@" in name else f"{name}:latest"


def _ctr(node: int, *words: str, stdin: Path | None = None) -> str:
    command = nodes.enter(node, "ctr", "-a", str(nodeconf.SOCKET), "-n", "k8s.io", *words)
    with (stdin or Path("/dev/null")).open("rb") as source:
        done = subprocess.run(command, stdin=source, capture_output=True, text=True, check=False, timeout=_IMPORT_SECONDS)
    if done.returncode:
        raise LabError(f"node{node}: ctr {' '.join(words)} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _record(node: int) -> Path:
    return nodeconf.store_folder(node) / "loaded.json"  # beside the images, so that both are deleted together


def loaded(node: int) -> dict[str, str]:
    """Return the keys of the images in a node's store, by image."""
    try:
        return dict(json.loads(_record(node).read_text()))
    except FileNotFoundError:
        return {}


# An import replaces the image of the same name. Meanwhile containerd may delete a layer of the old image that the new image shares.
@retry(retry=retry_if_exception_message(match="(?s).*parent snapshot .* does not exist"), stop=stop_after_attempt(3), reraise=True)
def _unpack(node: int, image: Image) -> str:
    # Read from stdin, because the archive's path may lead to another file inside the node.
    return _ctr(node, "images", "import", "-", stdin=image.archive)


def _import(node: int, image: Image) -> None:
    printed = _unpack(node, image)
    names = re.findall(r"^unpacking (\S+) \(", printed, re.MULTILINE)
    wanted = full_name(image.reference)
    if wanted not in names:
        if len(names) != 1:
            raise LabError(f"{image.archive} holds {names or 'no image'}, not {wanted}; build the archive with that name")
        _ctr(node, "images", "tag", "--force", names[0], wanted)
    record = loaded(node) | {image.reference: image.key}
    part = _record(node).with_suffix(".part")
    part.write_text(json.dumps(record, indent=1))
    part.rename(_record(node))


def load(images: list[Image], *, quiet: bool = False) -> None:
    """Import ``images`` into every node that does not have them yet."""
    live = sorted(nodes.running())
    if not live:
        raise LabError("No lab cluster runs on this machine. Run: make cluster-up")
    for image in images:
        if not image.archive.is_file():
            raise LabError(f"There is no archive {image.archive} for {image.reference}; build the images again")
    present = {node: set(_ctr(node, "images", "ls", "-q").split()) for node in live}
    for image in images:
        size = image.archive.stat().st_size / 1e6
        missing = [n for n in live if loaded(n).get(image.reference) != image.key or full_name(image.reference) not in present[n]]
        if not missing and not quiet:
            say(f"   0.0 s  {_names(live)} already has {image.reference}")
        if missing:
            progress = nullcontext() if quiet else step(f"import {image.reference} ({size:.0f} MB) into {_names(missing)}")
            # In parallel, because one import uses neither two cores nor a disk fully.
            with progress, ThreadPoolExecutor(len(missing)) as pool:
                list(pool.map(partial(_import, image=image), missing))


def _names(live: list[int]) -> str:
    return ", ".join(f"node{n}" for n in live)


def wait_for_runtime(node: int, seconds: float = 60.0) -> None:
    """Wait until a node's containerd answers."""

    def answers() -> bool:
        try:
            return bool(_ctr(node, "version"))
        except (LabError, KeyError):  # KeyError: the node's first process does not run yet
            return False

    wait_until(answers, seconds=seconds, every=0.2, what=f"containerd of node{node} did not start; see {nodeconf.node_folder(node)}/logs")


def load_pause(binaries: Path) -> None:
    """Pack and load the image of every pod's pause container."""
    program = binaries / "pause"
    image = Image(nodeconf.PAUSE, lab_root() / "pause.tar", content_key([program], nodeconf.PAUSE))
    archive.pack(program, image.reference, image.archive)
    load([image], quiet=True)
