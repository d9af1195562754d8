"""Certificates of an authority that exists in the test only."""

from __future__ import annotations

import base64
import ipaddress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    def write(self, path: Path) -> None:
        """Write the files as the kubelet mounts them for the front."""
        path.with_name(f"{path.name}.key").write_bytes(self.key)
        path.write_bytes(self.certificate)

    def secret(self, name: str, *, without: str = "") -> dict[str, Any]:
        """Return the Secret in the format of cert-manager."""
        data = {"tls.crt": self.certificate, "tls.key": self.key, "ca.crt": self.authority}
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items() if key != without}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "kubernetes.io/tls", "data": encoded}


@dataclass
class Authority:
    """An authority that signs certificates."""

    name: str = "authority of the test"
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def certificate(self) -> bytes:
        """Certificate of the authority, in PEM."""
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = self._builder(self.name, self.key.public_key()).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        return self._sign(builder.add_extension(usage, True))

    def issue(self, *names: str) -> Issued:
        """Return a new certificate for host names and addresses, with a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(names[0], key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative_name(name) for name in names]), False)
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Issued(self._sign(builder), pem, self.certificate)

    def _builder(self, name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder(_name(self.name), _name(name), public, x509.random_serial_number(), now - _DAY, now + _DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
