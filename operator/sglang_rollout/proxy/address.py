"""Addresses ``host:port`` on the command line and in configurations. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

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
    def url(self) -> str:
        """``http://host:port``, with the loopback address in place of a wildcard."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - recognised, not bound
        return f"http://{Address(host, self.port)}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_v6 else f"{self.host}:{self.port}"
