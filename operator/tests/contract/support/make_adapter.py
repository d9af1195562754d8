"""Write an adapter (LoRA): ``python make_adapter.py MODEL OUT SEED``; run by the engine environment's Python, which has torch."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
MODULES = ("q_proj", "v_proj")


def main(model: str, out: str, seed: str) -> None:
    config = json.loads(Path(model, "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    widths = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    torch.manual_seed(int(seed))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, config["hidden_size"])
            tensors[f"{place}.lora_B.weight"] = torch.randn(widths[module], RANK)
    Path(out).mkdir(parents=True)
    save_file(tensors, f"{out}/adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": list(MODULES)}
    Path(out, "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": model}))


if __name__ == "__main__":
    main(*sys.argv[1:])
