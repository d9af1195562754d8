"""The first process of an engine's container, and what runs before the container ends: shell, because the image is the user's.

An engine of one pod starts at once. The pods of a larger engine wait for each other first (the agent's word is the file ``go``), so that
no rank waits in torch's own rendezvous for one whose image is still being pulled, and none meets a rank of an earlier life.
"""

from __future__ import annotations

from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names

ENDED_BY_ITSELF = 70
"""Exit code of an engine that ended with 0 though nobody had asked it to (EX_SOFTWARE of sysexits.h)."""
DRAIN_SECONDS = 300
"""How long a pod that goes away waits for requests that are running: a long rollout takes minutes."""
FOLLOWER_SECONDS = 10
"""A rank other than 0 leaves SIGTERM to rank 0, which ends all of them within 3 s; it never ends when rank 0 is gone."""

_NCCL_VERSION = """\
from importlib.metadata import distributions
print("version=" + next((d.version for d in distributions() if (d.name or "").startswith("nvidia-nccl")), ""))\
"""
"""The package that torch brings: importing torch to ask it would take longer than some engines need to start."""

HANDLER = "trap 'exit 143' TERM\n"
"""The first line of all: a container's first process ends on no signal without a handler, and a pod that is deleted early would linger for
its whole grace."""

_IDENTITY = f"""\
{{ python3 -c '{_NCCL_VERSION}'; env | grep '^NCCL_'; }} > {names.NCCL_FILE} 2> /dev/null
cat /proc/sys/kernel/random/uuid > {names.BOOT_FILE}.new && mv {names.BOOT_FILE}.new {names.BOOT_FILE} || exit 1
"""
_WAIT = """\
wait "$child"; code=$?
while kill -0 "$child" 2> /dev/null; do wait "$child"; code=$?; done
"""

_WATCH = f"""\
while kill -0 "$child" 2> /dev/null; do
  test ! -e {names.KILL_FILE} || kill -KILL "$child"
  sleep 0.5
done &
"""
"""Looks for the kill file: liveness probes begin only after the engine has started, and one that hangs may never get there."""

_TELL = f"""\
test ! -e {names.KILL_FILE} || cat {names.KILL_FILE} >&2
test "$code" -ne 0 || test -e {names.DRAIN_FILE} || code={ENDED_BY_ITSELF}
exit "$code"
"""

START_SCRIPT = f"""\
rm -f {names.KILL_FILE} {names.DRAIN_FILE} {names.DRAINED_FILE} {names.NCCL_FILE}
{_IDENTITY}\
"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
{_WATCH}\
{_WAIT}\
{_TELL}"""
"""Gives this life of the container an identity before SGLang can answer anybody: the agent closes the gate on a new
one. SGLang ends with 0 also when its scheduler has crashed; the kubelet keeps the last lines of the log only for other codes."""

GROUP_START_SCRIPT = f"""\
rm -f {names.KILL_FILE} {names.DRAIN_FILE} {names.DRAINED_FILE} {names.NCCL_FILE} {names.GO_FILE}
{_IDENTITY}\
until test "$(cat {names.GO_FILE} 2> /dev/null)" = "$(cat {names.BOOT_FILE})"; do sleep 0.5 & wait $!; done
"$@" &
child=$!
if test "${NODE_RANK_ENV}" = 0; then
  trap 'kill -TERM "$child"' TERM
else
  trap '{{ kill -TERM "$child"; sleep {FOLLOWER_SECONDS}; kill -KILL "$child"; }} 2> /dev/null &' TERM
fi
{_WATCH}\
{_WAIT}\
rm -f {names.BOOT_FILE}
{_TELL}"""
"""The same in a pod of an engine that has several. The boot file goes with the engine, so that the other pods hear of its end before
the kubelet restarts it."""

FETCH_SCRIPT = f"""\
{HANDLER}\
"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
{_WAIT}\
exit "$code"
"""
"""Runs what fetches a model: a pod that is deleted meanwhile would hold its GPUs for its whole grace."""

DRAIN_SCRIPT = f"""\
test -e {names.KILL_FILE} && exit 0
for _ in $(seq {DRAIN_SECONDS}); do touch {names.DRAIN_FILE}; test -e {names.DRAINED_FILE} && exit 0; sleep 1; done
"""
"""Runs before SIGTERM: sidecars hear of the end only after this container is gone, so the agent is told by a file. Again and again, because
a start script that has only begun removes the file, and the agent takes one older than the engine's boot for an earlier engine's."""


def start_script(rollout: SGLangRollout, checks: str) -> str:
    """Return the first process of an engine's container. ``checks``: shell that runs before anything else."""
    return HANDLER + checks + (GROUP_START_SCRIPT if rollout.spec.engine.pods > 1 else START_SCRIPT)
