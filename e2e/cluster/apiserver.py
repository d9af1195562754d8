"""Command lines of the control plane's programs, shared by the lab cluster and the control plane without nodes."""

import ipaddress
import ssl
import urllib.request
from pathlib import Path

from e2e.cluster.pki import Pki

SERVICE_RANGE = "10.96.0.0/16"
_ISSUER = "https://kubernetes.default.svc"


def etcd(binaries: Path, data: Path, client_port: int, peer_port: int) -> list[str]:
    """Return etcd's command line. Without fsync, because the lab's data need not survive a power failure."""
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(binaries / "etcd"),
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(binaries: Path, pki: Pki, address: str, port: int, etcd_port: int) -> list[str]:
    """Return kube-apiserver's command line, with RBAC as in any real cluster."""
    p = pki.root
    return [
        str(binaries / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--secure-port={port}",
        f"--tls-cert-file={p}/apiserver.crt",
        f"--tls-private-key-file={p}/apiserver.key",
        f"--client-ca-file={pki.ca}",
        f"--kubelet-client-certificate={p}/admin.crt",
        f"--kubelet-client-key={p}/admin.key",
        f"--kubelet-certificate-authority={pki.ca}",
        "--kubelet-preferred-address-types=InternalIP",  # else logs and exec try to resolve the node's name
        f"--service-account-key-file={p}/sa.pub",
        f"--service-account-signing-key-file={p}/sa.key",
        f"--service-account-issuer={_ISSUER}",
        f"--api-audiences={_ISSUER}",
        f"--requestheader-client-ca-file={pki.ca}",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={p}/front.crt",
        f"--proxy-client-key-file={p}/front.key",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--enable-admission-plugins=NodeRestriction",
        # Pods of a lost node are replaced after 10 s instead of 300 s: tests wait for it.
        "--default-not-ready-toleration-seconds=10",
        "--default-unreachable-toleration-seconds=10",
        # Kubernetes 1.37 refuses to publish a loopback address as the endpoint of the Service `kubernetes`.
        *(["--endpoint-reconciler-type=none"] if ipaddress.ip_address(address).is_loopback else []),
    ]


def controller_manager(binaries: Path, pki: Pki, port: int) -> list[str]:
    """Return kube-controller-manager's command line. A node counts as lost after 16 s."""
    config = pki.root / "kcm.kubeconfig"
    return [
        str(binaries / "kube-controller-manager"),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki.root}/sa.key",
        f"--root-ca-file={pki.ca}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--node-monitor-grace-period=16s",
        "--node-monitor-period=2s",
    ]


def certificates(pki: Pki, server_names: str, server_url: str) -> None:
    """Create all certificates and kubeconfigs that the control plane needs."""
    pki.prepare()
    pki.certificate("apiserver", "/CN=kube-apiserver", server_names)
    pki.certificate("front", "/CN=front-proxy")
    for name, subject in {
        "admin": "/O=system:masters/CN=admin",
        "kcm": "/CN=system:kube-controller-manager",
        "sched": "/CN=system:kube-scheduler",
        "proxy": "/CN=system:kube-proxy",
    }.items():
        pki.certificate(name, subject)
        pki.kubeconfig(name, server_url)


def ready(url: str, pki: Pki) -> bool:
    """Return whether the API server at ``url`` is ready. Never uses a proxy."""
    context = ssl.create_default_context(cafile=str(pki.ca))
    context.load_cert_chain(pki.root / "admin.crt", pki.root / "admin.key")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{url}/readyz", timeout=2) as reply:  # HTTP 200: the body of a failing readyz contains "ok", too
            return bool(reply.status == 200)
    except OSError:
        return False
