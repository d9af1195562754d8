"""Checkpoints on disk: the safetensors format, folders of a Hugging Face model, and snapshots of committed versions.

The trainer library writes snapshots; agents check and load checkpoints. Never imports torch.
"""
