"""The command line of smg, and the output of `sglang-rollout proxy`."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.cli import command
from sglang_rollout.proxy.smg import POLICIES, engine_labels, smg_args


def args(policy: str = "CacheAware", **more: object) -> list[str]:
    listen, metrics_listen = Address("127.0.0.1", 30010), Address("127.0.0.1", 30011)
    return smg_args(listen=listen, metrics_listen=metrics_listen, policy=policy, **more)  # type: ignore[arg-type]


def test_smg_retries_for_a_minute_while_all_gates_are_closed() -> None:
    line = args()
    tries, pause = (int(line[line.index(flag) + 1]) for flag in ("--retry-max-retries", "--retry-max-backoff-ms"))
    assert pause <= 250
    assert 55 <= tries * pause / 1000 <= 65


def test_policies_and_extra_arguments() -> None:
    named = {policy: args(policy)[args(policy).index("--policy") + 1] for policy in POLICIES}
    # smg does not start with power_of_two and no engines, so the engines bring it.
    assert named == {**POLICIES, "PowerOfTwo": "random"}
    assert [engine_labels(policy) for policy in ("PowerOfTwo", "CacheAware", None)] == [{"policy": "power_of_two"}, {}, {}]
    assert args(extra=["--log-level", "debug"])[-2:] == ["--log-level", "debug"]
    assert args(served_name="qwen")[-2:] == ["--model-alias", "default=qwen"]


def test_smg_takes_each_request_that_the_front_takes_and_no_larger_answer() -> None:
    def limit(*options: str) -> int:
        line = CliRunner().invoke(command, ["smg", *options, "--print"]).output.split()
        return int(line[line.index("--max-payload-size") + 1])

    assert limit() == Limits().request_bytes == 128 * 2**20
    assert limit("--limits", '{"requestBytes": 400000000}') == 400_000_000
    assert limit("--limits", '{"requestBytes": 1024}') == 128 * 2**20, "answers may be larger than requests"


@pytest.mark.router
def test_smg_accepts_every_flag() -> None:
    text = subprocess.run([sys.executable, "-m", "smg.launch_router", "--help"], capture_output=True, text=True, check=True).stdout
    unknown = [flag for flag in args(served_name="m") if flag.startswith("--") and flag not in text]
    assert not unknown


def test_print_shows_the_command() -> None:
    gate = CliRunner().invoke(command, ["gate", "--socket", "/run/x/gate.sock", "--print"])
    assert gate.exit_code == 0
    assert "bind [::]:30000 v4v6" in gate.output
    front = CliRunner().invoke(command, ["front", "--listen", "127.0.0.1:1234", "--print"])
    assert "bind 127.0.0.1:1234" in front.output
    smg = CliRunner().invoke(command, ["smg", "--policy", "RoundRobin", "--print", "--", "--log-level", "debug"])
    assert "--policy round_robin" in smg.output
    assert smg.output.strip().endswith("--log-level debug")


@pytest.mark.parametrize(
    "line", [["gate", "--socket", "x"], ["gate", "--socket", "/x", "--listen", "80"], ["smg", "--policy", "No"], ["smg", "--listen", "x"]]
)
def test_invalid_input_is_a_usage_error(line: list[str]) -> None:
    result = CliRunner().invoke(command, [*line, "--print"])
    assert result.exit_code == 2
    assert "Error: " in result.output
