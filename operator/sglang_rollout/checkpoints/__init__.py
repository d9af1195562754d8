"""Checkpoints on disk: the safetensors format, folders of a Hugging Face model, and snapshots of committed versions. No torch.

Shared by the trainer library, which writes, and by agents and coordinator, which check and read.
"""
