"""Certificates and kubeconfigs of a cluster: one CA and named client certificates, created with openssl."""

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.say import LabError

_DAYS = "3650"
# Elliptic curves: a key takes a millisecond. RSA keys took longer than the rest of a control plane's start.
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*words: str, stdin: str = "") -> str:
    done = subprocess.run(["openssl", *words], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"openssl {words[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


@dataclass(frozen=True)
class Pki:
    """A folder of certificates. No method replaces an existing certificate."""

    root: Path

    @property
    def ca(self) -> Path:
        """Certificate of the authority that signs all other certificates."""
        return self.root / "ca.crt"

    def prepare(self) -> None:
        """Create the authority and the key pair that signs service account tokens."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.ca.exists():
            _openssl(
                "req", "-x509", *_NEW_KEY, "-days", _DAYS, "-subj", "/CN=sgr-ca", "-keyout", str(self.root / "ca.key"), "-out", str(self.ca)
            )
        if not (self.root / "sa.pub").exists():
            key = str(self.root / "sa.key")
            _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", key)
            _openssl("pkey", "-in", key, "-pubout", "-out", str(self.root / "sa.pub"))

    def certificate(self, name: str, subject: str, names: str = "") -> None:
        """Create ``name``.crt and ``name``.key for ``subject``. ``names``: subjectAltNames of a server."""
        certificate, request = self.root / f"{name}.crt", self.root / f"{name}.csr"
        if certificate.exists():
            return
        extensions = "keyUsage=digitalSignature,keyEncipherment\nextendedKeyUsage=serverAuth,clientAuth\n"
        if names:
            extensions += f"subjectAltName={names}\n"
        _openssl("req", *_NEW_KEY, "-subj", subject, "-keyout", str(self.root / f"{name}.key"), "-out", str(request))
        part = certificate.with_suffix(".part")  # renamed at the end, so that a crash leaves no incomplete certificate
        _openssl(
            "x509",
            "-req",
            "-in",
            str(request),
            "-CA",
            str(self.ca),
            "-CAkey",
            str(self.root / "ca.key"),
            "-CAcreateserial",
            "-days",
            _DAYS,
            "-out",
            str(part),
            "-extfile",
            "/dev/stdin",
            stdin=extensions,
        )
        part.rename(certificate)
        request.unlink()

    def kubeconfig(self, name: str, server: str) -> Path:
        """Write a self-contained kubeconfig for the client certificate ``name``, and return its path."""

        def inline(file: str) -> str:
            return base64.b64encode((self.root / file).read_bytes()).decode()

        path = self.root / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        user = {"client-certificate-data": inline(f"{name}.crt"), "client-key-data": inline(f"{name}.key")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "sgr-lab",
            "contexts": [{"name": "sgr-lab", "context": {"cluster": "sgr-lab", "user": name}}],
            "clusters": [{"name": "sgr-lab", "cluster": {"server": server, "certificate-authority-data": inline("ca.crt")}}],
            "users": [{"name": name, "user": user}],
        }
        path.write_text(json.dumps(config, indent=1))  # JSON is YAML too
        return path
