"""Runs in a pod: write a checkpoint of a model plus seeded noise, as in push.py.

usage: python - MODEL SEED FOLDER
"""

import shutil
import sys

import torch
from safetensors.torch import load_file, save_file

model, seed, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(seed)
noisy = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file(f"{model}/model.safetensors").items()}
shutil.copytree(model, folder)
save_file(noisy, f"{folder}/model.safetensors", metadata={"format": "pt"})
