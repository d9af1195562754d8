"""Start and stop scripts of the engine's container, in shell, because the image is the user's.

An engine of one pod starts at once. The pods of a larger engine wait until the agent writes the file ``go``. So all ranks are
present when torch's rendezvous begins, and no rank meets a rank of an earlier boot.
"""

from __future__ import annotations

from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names, plugin

ENDED_BY_ITSELF = 70
"""Exit code of an engine that ended with 0 without a drain (EX_SOFTWARE of sysexits.h)."""
DRAIN_SECONDS = 300
"""How long a deleted pod waits for running requests. A long rollout takes minutes."""
FOLLOWER_SECONDS = 10
"""Time after SIGTERM until a rank other than 0 is killed. Rank 0 ends all ranks within 3 s. Without rank 0 they never end."""

_NCCL_VERSION = """\
from importlib.metadata import distributions
print("version=" + next((d.version for d in distributions() if (d.name or "").startswith("nvidia-nccl")), ""))\
"""
"""Print the version of NCCL from its package. Importing torch takes longer than some engines need to start."""

HANDLER = "trap 'exit 143' TERM\n"
"""First line of every script. Without a handler, a container's first process ignores SIGTERM, and its pod ends only after its grace."""

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
"""Kill the engine when the kill file appears. Liveness probes begin after the start, which an engine that hangs never reaches."""

_EXIT = f"""\
test ! -e {names.KILL_FILE} || cat {names.KILL_FILE} >&2
test "$code" -ne 0 || test -e {names.DRAIN_FILE} || code={ENDED_BY_ITSELF}
exit "$code"
"""

START_SCRIPT = f"""\
rm -f {names.KILL_FILE} {names.DRAIN_FILE} {names.DRAINED_FILE} {names.NCCL_FILE}
{_IDENTITY}\
{plugin.START_LINES}\
"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
{_WATCH}\
{_WAIT}\
{_EXIT}"""
"""Start script of an engine of one pod.

The script writes a new boot ID before SGLang answers, so that the agent closes the gate. SGLang ends with 0 also when its scheduler has
crashed, but the kubelet keeps the last lines of the log only for other exit codes.
"""

GROUP_START_SCRIPT = f"""\
rm -f {names.KILL_FILE} {names.DRAIN_FILE} {names.DRAINED_FILE} {names.NCCL_FILE} {names.GO_FILE}
{_IDENTITY}\
{plugin.START_LINES}\
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
{_EXIT}"""
"""Start script of an engine of several pods. At the end it removes the boot file, so that the other pods notice before a restart."""

FETCH_SCRIPT = f"""\
{HANDLER}\
"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
{_WAIT}\
exit "$code"
"""
"""Run the download of a model, and end it at SIGTERM, so that a deleted pod releases its GPUs."""

DRAIN_SCRIPT = f"""\
test -e {names.KILL_FILE} && exit 0
for _ in $(seq {DRAIN_SECONDS}); do touch {names.DRAIN_FILE}; test -e {names.DRAINED_FILE} && exit 0; sleep 1; done
"""
"""preStop hook: wait until the agent has drained the engine.

A file informs the agent, because sidecars receive SIGTERM only after this container has ended. The hook touches the file repeatedly,
because a start script that has just begun removes it. The agent ignores a file that is older than the engine's boot.
"""


def start_script(rollout: SGLangRollout, checks: str) -> str:
    """Return the start script of an engine's container, which runs the shell of ``checks`` first."""
    return HANDLER + checks + (GROUP_START_SCRIPT if rollout.spec.engine.pods > 1 else START_SCRIPT)
