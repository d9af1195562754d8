"""Addresses on the command line and in configurations: ``host:port`` and ``unix@/path``, as haproxy writes them. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

UNIX_PREFIX = "unix@"
_SOCKET_PATH = re.compile(r"/[A-Za-z0-9._/-]{1,99}")
"""Linux limits the path to 107 bytes. Blanks and quotes would change the configuration."""
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address. ``host`` is a name, an IPv4 address or an IPv6 address without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``host:port`` or ``[v6]:port``. Brackets around other hosts are removed.

        Raises:
            ValueError: The text is not an address; the message is for people.
        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError(f"{text!r} is not an address: write host:port with a port from 1 to 65535, for example 127.0.0.1:30000")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if ":" in bare:
            try:
                ipaddress.IPv6Address(bare)
            except ValueError as error:
                raise ValueError(f"{text!r} is not an address: {error}") from None
        elif not _HOST_NAME.fullmatch(bare):
            raise ValueError(f"{text!r} is not an address: {bare!r} is neither a host name nor an IP address")
        return cls(host=bare, port=int(port))

    @property
    def is_v6(self) -> bool:
        """True if the host is an IPv6 address."""
        return ":" in self.host

    @property
    def is_ip(self) -> bool:
        """True if the host is an IP address, not a name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def url(self) -> str:
        """``http://host:port``, with the loopback address in place of a wildcard."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - recognised, not bound
        return f"http://{Address(host, self.port)}"

    @property
    def check_address(self) -> str:
        """Arguments of haproxy's ``check`` that send checks here."""
        return f"addr {f'[{self.host}]' if self.is_v6 else self.host} port {self.port}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_v6 else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A Unix socket. Only processes that see its folder can connect, unlike a port of a network that containers share."""

    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``unix@/path``.

        Raises:
            ValueError: The text is not the address of a Unix socket; the message is for people.
        """
        path = text.removeprefix(UNIX_PREFIX)
        if not _SOCKET_PATH.fullmatch(path):
            raise ValueError(f"{text!r} is not the address of a Unix socket: write {UNIX_PREFIX}/path, at most 100 plain characters")
        return cls(path)

    @property
    def check_address(self) -> str:
        """Arguments of haproxy's ``check`` that send checks here."""
        return f"addr {self}"

    def __str__(self) -> str:
        return f"{UNIX_PREFIX}{self.path}"


def complete_service_name(host: str, resolver_settings: str) -> str:
    """Return the full name of a Service from ``<name>.<namespace>.svc``, for a resolver without search list; other names are unchanged.

    Args:
        host: The name.
        resolver_settings: Text of the pod's ``/etc/resolv.conf``, whose search list contains ``svc.<domain of the cluster>``.
    """
    lists = [line.split()[1:] for line in resolver_settings.splitlines() if line.split()[:1] == ["search"]]
    domains = [domain.rstrip(".") for domain in (lists[-1] if lists else []) if domain.startswith("svc.")]
    return f"{host}.{domains[0].removeprefix('svc.')}" if domains and host.endswith(".svc") else host


Endpoint = Address | UnixSocket
"""Address of a process: a TCP address or a Unix socket."""


def parse_endpoint(text: str) -> Endpoint:
    """Parse ``host:port`` or ``unix@/path``. Raises ValueError as the two parsers do."""
    return UnixSocket.parse(text) if text.startswith(UNIX_PREFIX) else Address.parse(text)
