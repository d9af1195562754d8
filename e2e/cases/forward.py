"""Runs in a pod: generate greedily in a plain forward pass with a model plus seeded noise, as in push.py. Prints token IDs.

usage: python - MODEL SEED [ADAPTER]

ADAPTER: the folder of an adapter (LoRA) whose weights are added to the model's; its scale is 1.
"""

import shutil
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

folder, seed = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
if seed:
    torch.manual_seed(seed)
    noisy = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file(f"{folder}/model.safetensors").items()}
    with tempfile.TemporaryDirectory() as copy:  # the names in the file are not those of the module for every architecture
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        save_file(noisy, f"{copy}/model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
if len(sys.argv) > 3:
    adapter = load_file(f"{sys.argv[3]}/adapter_model.safetensors")
    for name, low in adapter.items():
        if name.endswith(".lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight.data += adapter[name.replace("lora_A", "lora_B")] @ low
ids = torch.tensor([[11, 22, 33]])
print(model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 3:].tolist())
