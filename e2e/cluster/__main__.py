"""``python -m e2e.cluster``: a real Kubernetes on this machine, or a look at the one you have (CLUSTER=current)."""

import argparse
import os
import shlex
import subprocess
import sys

from e2e.cluster import binaries, lab, network, preflight, store
from e2e.cluster.say import LabError, say

_DIRECT = ("localhost", "127.0.0.1", network.API, "10.88.0.0/16", "10.96.0.0/16", ".svc", ".cluster.local")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab",
        description="A real Kubernetes on one Linux machine without Docker. "
        "CLUSTER=current uses your kubectl context instead, CLUSTER=none no cluster.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("binaries", help="build Kubernetes, etcd, CoreDNS and Helm into the cache and print their folder")
    commands.add_parser("preflight", help="check for missing programs; as root on Debian, install them")
    up = commands.add_parser("up", help="bring the cluster up")
    up.add_argument("--nodes", type=int, default=1, help="number of nodes (1)")
    up.add_argument("--gpus", type=int, default=0, help="GPUs that every node pretends to have (0)")
    commands.add_parser("status", help="print what runs; exit code 1 unless the cluster is complete")
    down = commands.add_parser("down", help="remove the cluster from the machine; images stay in the cache")
    down.add_argument("--data", action="store_true", help="delete images, certificates and logs too")
    env = commands.add_parser("env", help='print the shell lines for kubectl and helm: eval "$(… env)"')
    env.add_argument("--tools", action="store_true", help="only the programs, no cluster")
    load = commands.add_parser("load", help="import images into all nodes that do not have them yet")
    load.add_argument("words", nargs="*", metavar="REF ARCHIVE KEY", help="without arguments: lines from stdin")
    return parser


def _kubectl(*words: str) -> str:
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def _current_context() -> str:
    """Check that the user's cluster answers, and return the name of its context."""
    try:
        context = _kubectl("config", "current-context")
        _kubectl("--request-timeout=10s", "get", "--raw", "/readyz")
    except FileNotFoundError as error:
        raise LabError("CLUSTER=current needs kubectl on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise LabError("CLUSTER=current, but the current kubectl context did not answer within 30 s") from error
    except subprocess.CalledProcessError as error:
        raise LabError(f"CLUSTER=current, but the current kubectl context does not answer: {error.stderr.strip()[-500:]}") from error
    return context


def _environment(cluster: str, *, tools: bool) -> None:
    folder = shlex.quote(str(binaries.find())) if cluster == "lab" or binaries.built() else ""
    if tools or cluster != "lab":
        if folder:
            print(f"export PATH={folder}:$PATH" if cluster == "lab" else f"export PATH=$PATH:{folder}")
        return
    direct = [word for word in os.environ.get("NO_PROXY", "").split(",") if word and word not in _DIRECT]
    print(f"export KUBECONFIG={shlex.quote(str(lab.kubeconfig()))}")
    print(f"export PATH={folder}:$PATH")
    print(f"export NO_PROXY={shlex.quote(','.join([*direct, *_DIRECT]))} no_proxy={shlex.quote(','.join([*direct, *_DIRECT]))}")


def _foreign(command: str, cluster: str) -> None:
    """Handle a command for a cluster that the lab does not own. Changes nothing there."""
    if cluster == "current" and command in ("up", "status"):
        say(f"          using your cluster: context {_current_context()} answers; nothing is changed there by this step")
    else:
        say(f"          CLUSTER={cluster}: nothing to do for {command}")


def _run(options: argparse.Namespace) -> int:
    cluster = os.environ.get("CLUSTER") or "lab"
    if cluster not in ("lab", "current", "none"):
        raise LabError(f"CLUSTER={cluster} is unknown; use lab (a cluster on this machine), current (your kubectl context) or none")
    if options.command == "binaries":
        print(binaries.build())
    elif options.command == "env":
        _environment(cluster, tools=options.tools)
    elif cluster != "lab" and options.command == "preflight":
        preflight.install(lab=False)
    elif cluster != "lab":
        _foreign(options.command, cluster)
    elif options.command == "preflight":
        preflight.check()
    elif options.command == "up":
        lab.up(options.nodes, options.gpus)
    elif options.command == "down":
        lab.down(data=options.data)
    elif options.command == "status":
        return 0 if lab.status() else 1
    else:
        words = options.words or [word for line in sys.stdin for word in line.split()]
        store.load(store.parse(words))
    return 0


def main() -> int:
    """Run the command line."""
    try:
        return _run(_parser().parse_args())
    except LabError as error:
        say(f"lab: {error}")
        return 1
    except KeyboardInterrupt:
        say("lab: interrupted; `make cluster-down` removes what was started")
        return 130


if __name__ == "__main__":
    sys.exit(main())
