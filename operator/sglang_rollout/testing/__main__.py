"""``python -m sglang_rollout.testing``: the same as ``sglang-rollout stand-in``."""

from sglang_rollout.testing.cli import command

if __name__ == "__main__":
    command()
