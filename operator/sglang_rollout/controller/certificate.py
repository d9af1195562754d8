"""Can the front serve HTTPS with the Secret of ``security.tls``?"""

from __future__ import annotations

import base64
import os
import ssl

from sglang_rollout.controller.render.tls import CERTIFICATE_KEY, PRIVATE_KEY
from sglang_rollout.kube.resources import Object


def describe_missing_secret(name: str, namespace: str) -> str:
    """Return that the Secret does not exist, as a sentence."""
    return (
        f"spec.security.tls.secretName is {name}, and namespace {namespace} has no Secret of that name: create it, for example with a"
        " Certificate of cert-manager, or remove tls."
    )


def describe_defect(secret: Object) -> str:
    """Return why the front could not start with a Secret, as a sentence; empty if it could."""
    name, data = secret["metadata"]["name"], secret.get("data") or {}
    missing = [key for key in (CERTIFICATE_KEY, PRIVATE_KEY) if not data.get(key)]
    if missing:
        return f"Secret {name}, which spec.security.tls.secretName names, has no key {' and no key '.join(missing)}."
    certificate, key = (base64.b64decode(data[key]) for key in (CERTIFICATE_KEY, PRIVATE_KEY))
    if _is_pair(certificate, key):
        return ""
    return (
        f"Secret {name}, which spec.security.tls.secretName names, does not hold a certificate in {CERTIFICATE_KEY} and its private key,"
        f" without a password, in {PRIVATE_KEY}."
    )


def _is_pair(certificate: bytes, key: bytes) -> bool:
    """Return True if both are PEM and belong together. Python reads them from a file, which here exists in memory only."""
    file = os.memfd_create("certificate")
    try:
        os.write(file, certificate + b"\n" + key)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(f"/proc/self/fd/{file}", password=lambda: "")
    except ssl.SSLError:
        return False
    finally:
        os.close(file)
    return True
