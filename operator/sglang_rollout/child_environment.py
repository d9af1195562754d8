"""The environment of processes that a process of the fleet starts, or becomes."""

from __future__ import annotations

from collections.abc import Mapping

PROXY_VARIABLES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "WS_PROXY", "WSS_PROXY"})
"""Variables that send the requests of a process to a proxy, in capitals. Programs also read them in small letters."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without proxies.

    The processes of a fleet call each other directly. smg would send each request to the proxy of the user's shell, or of the node.
    """
    return {name: value for name, value in environ.items() if name.upper() not in PROXY_VARIABLES}
