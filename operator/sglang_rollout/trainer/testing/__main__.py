"""``python -m sglang_rollout.trainer.testing``: the same as ``sglang-rollout stand-in``."""

from sglang_rollout.trainer.testing.cli import command

if __name__ == "__main__":
    command()
