"""SGLang's own parser reads the rendered arguments as the spec's fields mean them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from e2e.cluster.say import LabError
from e2e.engine import Engine, environment

from sglang_rollout.api.engine_flags import FLAGS
from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.engine_arguments import server_args, server_ranks
from sglang_rollout.controller.render.names import engine_ports
from tests.contract.support.agent_pod import run_pod
from tests.support.paths import DOCS, GOLDEN_INPUTS
from tests.support.ports import free_port

pytestmark = pytest.mark.engine
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
found = [vars(parser.parse_args(args)) for args in json.load(sys.stdin)]
print("\\n" + json.dumps(found, default=str))
"""
RETIRED = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
known = {flag: action for action in parser._actions for flag in action.option_strings}

def retired(word):
    action = known.get(word)
    return action is not None and ("deprecated" in (action.help or "").lower() or type(action).__name__.startswith("Deprecated"))

print("\\n" + json.dumps([[word for word in args if retired(word)] for args in json.load(sys.stdin)]))
"""
JUDGE = """
import argparse, json, sys
from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.arg_groups.parallel_hook import handle_data_parallelism
from sglang.srt.arg_groups.validation_hook import check_server_args
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)

def verdict(args):
    for check in (handle_data_parallelism, check_lora_server_args, check_server_args):
        try:
            check(ServerArgs.from_cli_args(parser.parse_args(args)))
        except (AssertionError, ValueError) as error:
            return f"{check.__name__}: {error}"
        except SystemExit:
            return "the parser ends"
        except (TypeError, AttributeError):
            pass  # later checks read settings that SGLang derives from the model and the GPUs, and that are None here
    return ""

print("\\n" + json.dumps([verdict(args) for args in json.load(sys.stdin)]))
"""
EVERY_SETTING = {
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,
    "tp_size": 8,
    "ep_size": 8,
    "attn_dp_size": 4,
    "mem_fraction_static": 0.85,
    "max_running_requests": 512,
    "context_length": 32768,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": 8192,
    "attention_backend": "fa3",
    "mm_attention_backend": "triton_attn",
    "kv_cache_dtype": "fp8_e5m2",
    "quantization": "fp8",
    "dtype": "bfloat16",
    "random_seed": 7,
    "enable_deterministic_inference": True,
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,
    "moe_a2a_backend": "deepep",
    "moe_runner_backend": "deep_gemm",
    "enable_eplb": True,
    "log_level": "warning",
    "enable_metrics": True,
}


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return str(environment.python(make=False))
    except LabError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def parsed(python: str) -> dict[str, dict[str, Any]]:
    """Return the settings that SGLang's parser reads from the arguments of each golden input, by the input's name."""
    paths = sorted(GOLDEN_INPUTS.glob("*.yaml"))
    answers = asked_of(python, PARSE, [server_args(rollout(path.read_text())) for path in paths])
    return dict(zip([path.stem for path in paths], answers, strict=True))


def asked_of(python: str, program: str, every: list[list[str]]) -> list[Any]:
    """Run a program in the engine environment, and return its answer for each list of arguments."""
    done = subprocess.run(
        [python, "-c", program],
        input=json.dumps(every),
        capture_output=True,
        text=True,
        timeout=110,
        env=environment.environment_variables(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def of_pods(made: SGLangRollout) -> list[list[str]]:
    """Return the arguments of every pod of engine 1, after Kubernetes has replaced the variables."""
    engine, ports = names.engine_name(made.name, 1), engine_ports(made, 1)
    args = server_args(made, server_ranks(made, engine, ports), ports)
    return [[word.replace(f"$({NODE_RANK_ENV})", str(rank)) for word in args] for rank in range(made.spec.engine.pods)]


def test_arguments_of_each_pod_name_the_place_of_its_ranks(python: str) -> None:
    made = {path.stem: rollout(path.read_text()) for path in sorted(GOLDEN_INPUTS.glob("*.yaml"))}
    every = [(name, rank, args) for name, one in made.items() for rank, args in enumerate(of_pods(one))]
    found = asked_of(python, PARSE, [args for _, _, args in every])
    for (name, rank, _), settings in zip(every, found, strict=True):
        pods = made[name].spec.engine.pods
        assert (settings["nnodes"], settings["node_rank"]) == (pods, rank), name
        assert (settings["dist_init_addr"] or "").startswith(f"{made[name].name}-engine-1-0.") is (pods > 1), name
    assert any(rank > 0 for _, rank, _ in every), "no golden file with several pods"


def test_sglang_accepts_the_sizes_of_every_golden_file(python: str) -> None:
    # With pipeline stages SGLang sets this flag itself, after it has read the model.
    every = [
        [*args, "--disable-overlap-schedule"]
        for path in sorted(GOLDEN_INPUTS.glob("*.yaml"))
        for args in of_pods(rollout(path.read_text()))
    ]
    assert set(asked_of(python, JUDGE, every)) == {""}


def test_no_flag_is_deprecated(python: str) -> None:
    """Checks the rendered flags, and those that the docs name for ``engine.args``."""
    every = [args for path in sorted(GOLDEN_INPUTS.glob("*.yaml")) for args in of_pods(rollout(path.read_text()))]
    assert set(FLAGS.values()) <= {word for args in every for word in args}, "no golden input has this flag"
    guides = [flag for text in DOCS.rglob("*.md") for flag in re.findall(r'"(--[a-z0-9-]+)"', text.read_text())]
    *found, known = asked_of(python, RETIRED, [*every, guides, ["--disable-cuda-graph"]])
    assert [words for words in found if words] == []
    assert known == ["--disable-cuda-graph"], "this deprecated flag must be found"


def test_sglang_refuses_what_the_crd_refuses(python: str) -> None:
    """Except for two rules: SGLang 0.5.23 checks ``--ep-size`` and stages over nodes only when ranks start, on GPUs."""
    refused = {
        "--tp-size 4 --attn-dp-size 3": "handle_data_parallelism",
        "--tp-size 2 --dp-size 2 --attn-dp-size 2": "data-parallel replicas combined with attention data parallelism",
        "--tp-size 3 --nnodes 2": "tp_size must be divisible by number of nodes",
        "--tp-size 2 --dp-size 2 --nnodes 2": "multi-node data-parallel replicas are not supported",
        "--enable-lora --max-lora-rank 8 --lora-target-modules all q_proj": "it should be the only module specified",
        "--moe-runner-backend lora_triton": "requires --enable-lora",
        "--moe-runner-backend lora_triton --enable-lora --max-lora-rank 8 --lora-target-modules all": "requires --lora-backend triton_v2",
        "--served-model-name qwen:7b": "served_model_name cannot contain a colon",
        "--served-model-name --x": "the parser ends",
    }
    verdicts = asked_of(python, JUDGE, [["--model-path", "m", *words.split()] for words in refused])
    assert [expected in verdict for expected, verdict in zip(refused.values(), verdicts, strict=True)] == [True] * len(refused), verdicts


def rollout(text: str) -> SGLangRollout:
    return SGLangRollout.model_validate(yaml.safe_load(text))


def test_each_field_sets_the_setting_that_it_names(parsed: dict[str, dict[str, Any]]) -> None:
    found = parsed["moe-every-setting"]
    assert {name: found[name] for name in EVERY_SETTING} == EVERY_SETTING
    assert len(EVERY_SETTING) == len(FLAGS) + 3, "EVERY_SETTING lacks a field"


def test_adapter_settings_are_set_and_no_adapter_is_loaded_at_the_start(parsed: dict[str, dict[str, Any]]) -> None:
    found = parsed["lora"]
    names = ("enable_lora", "max_lora_rank", "max_loras_per_batch", "lora_backend", "lora_paths")
    assert [found[name] for name in names] == [True, 16, 4, "triton", None]
    assert sorted(found["lora_target_modules"]) == ["q_proj", "v_proj"]


def test_omitted_fields_keep_sglangs_defaults(parsed: dict[str, dict[str, Any]]) -> None:
    found = parsed["minimal-cpu"]
    ours = {"host": "127.0.0.1", "model_path": "/models/tiny", "weight_version": "base", "tp_size": 1, "load_format": "auto"}
    assert {name: found[name] for name in ours} == ours
    assert (found["mem_fraction_static"], found["max_running_requests"], found["ep_size"], found["log_level"]) == (None, None, 1, "info")


RUNS = """
apiVersion: rollout.sglang.io/v1alpha1
kind: SGLangRollout
metadata: {name: run}
spec:
  model: {path: MODEL, servedName: policy}
  engine:
    image: none
    gpuResource: ""
    memFractionStaticPercent: 30
    maxRunningRequests: 9
    contextLength: 1024
    maxPrefillTokens: 2048
    chunkedPrefillSize: 512
    attentionBackend: torch_native
    kvCacheDtype: auto
    dtype: float32
    randomSeed: 7
    skipTokenizerInit: true
    disableRadixCache: true
    logLevel: Warning
    metrics: true
"""
READ_BACK = {
    "mem_fraction_static": 0.3,
    "max_running_requests": 9,
    "context_length": 1024,
    "max_prefill_tokens": 2048,
    "chunked_prefill_size": 512,
    "attention_backend": "torch_native",
    "dtype": "float32",
    "random_seed": 7,
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,
    "log_level": "warning",
    "enable_metrics": True,
    "served_model_name": "policy",
}


@pytest.fixture(scope="module")
def running(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, port = environment.model(), free_port()
    args = server_args(rollout(RUNS.replace("MODEL", str(model))))
    command = [python, "-m", "sglang.launch_server", *args, "--port", str(port), "--device", "cpu", "--max-total-tokens", "4096"]
    engine = Engine(port, command, tmp_path_factory.mktemp("run") / "engine.log", environment.environment_variables())
    engine.start()
    try:
        engine.wait()
        yield engine
    finally:
        engine.kill()


@pytest.mark.timeout(400)
def test_running_server_reports_the_settings(running: Engine) -> None:
    info = requests.get(f"{running.url}/server_info", timeout=30).json()
    assert {name: info[name] for name in READ_BACK} == READ_BACK


@pytest.mark.router
@pytest.mark.timeout(400)
async def test_engine_without_a_tokenizer_accepts_only_token_ids(running: Engine, tmp_path: Path) -> None:
    """SGLang itself answers chat and completions of token IDs with 500 and an internal error. The gate refuses them with 400."""
    ids = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    async with run_pod(tmp_path, running.url) as gated:
        await gated.open_with_base()
        answer = await gated.ask("POST", "/generate", ids)
        assert (answer.status, len(answer.body["output_ids"]), "text" in answer.body) == (200, 2, False)
        text = await gated.ask("POST", "/generate", {**ids, "input_ids": None, "text": "a"})
        assert (text.status, "Please provide input_ids" in str(text.body)) == (400, True)
        for path, body in {
            "/v1/chat/completions": {"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
            "/v1/completions": {"model": "policy", "prompt": [5, 6], "max_tokens": 2},
        }.items():
            refused = await gated.ask("POST", path, body)
            assert (refused.status, refused.body["error"]["code"]) == (400, "no_tokenizer")
            assert "input_ids to /generate" in refused.body["error"]["message"]
