"""Run real CPU engines from a shell.

python3 -m e2e.engine prepare                                     create environments and tiny model, print their paths
python3 -m e2e.engine PORT [flags of sglang.launch_server]        run one engine in the foreground
"""

import os
import sys

from e2e.engine import LabError, environment, make_engine


def _prepare() -> None:
    print(f"python={environment.python()}")
    print(f"model={environment.model()}")
    print(f"old={environment.old_release(make=True)}")


def _serve(port: int, flags: list[str]) -> None:
    """Replace this process by the server, so that signals reach the server and its exit code is returned."""
    environment.python()
    engine = make_engine(port, args=flags)
    os.execve(engine.command[0], list(engine.command), engine.environment)


def main() -> None:
    """Read the command line."""
    words = sys.argv[1:]
    try:
        if words == ["prepare"]:
            _prepare()
        elif words and words[0].isdigit():
            _serve(int(words[0]), words[1:])
        else:
            sys.exit((__doc__ or "").strip())
    except LabError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
