"""Start a stand-in engine with the command line that the operator generates for SGLang's server.

The rollout puts this package and our library before SGLang on the engine's PYTHONPATH (``e2e/stand_in``).
"""

import argparse

from sglang_rollout.testing.__main__ import command

parser = argparse.ArgumentParser()
for name in ("--host", "--port", "--tp-size", "--weight-version"):
    parser.add_argument(name, required=True)
for flag in ("--enable-lora", "--enable-memory-saver", "--enable-weights-cpu-backup"):
    parser.add_argument(flag, action="store_true")
parser.add_argument("--custom-weight-loader", default="")
parser.add_argument("--dp-size", default="1")
known, _ = parser.parse_known_args()
memory = ["--memory-saver"] * known.enable_memory_saver + ["--weights-backup"] * known.enable_weights_cpu_backup
command(
    [
        "--host",
        known.host,
        "--port",
        known.port,
        "--tensor",
        known.tp_size,
        "--data",
        known.dp_size,
        "--weight-version",
        known.weight_version,
        *memory,
        *["--lora"] * known.enable_lora,
        *(["--custom-weight-loader", known.custom_weight_loader] if known.custom_weight_loader else []),
    ]
)
