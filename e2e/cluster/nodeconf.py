"""Configuration files of a node's programs: containerd, its network plugins, kubelet, kube-proxy, CoreDNS."""

import json
import resource
from pathlib import Path

from e2e.cluster import network
from e2e.cluster.paths import lab_root

RUN = Path("/run/sgr")
"""A node's run folder. Each node has its own /run in memory."""
SOCKET = RUN / "containerd.sock"
PAUSE = "sgr.local/pause:1"
_PLUGIN_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))


def plugin_folder() -> Path | None:
    """Return the folder with the CNI plugins, if they are installed."""
    return next((folder for folder in _PLUGIN_FOLDERS if (folder / "bridge").exists()), None)


def node_folder(node: int) -> Path:
    """Return the folder of a node."""
    return lab_root() / f"node{node}"


def store_folder(node: int) -> Path:
    """Return the folder of a node's images, which outlives the node."""
    return node_folder(node) / "store"


def runtime_folder(node: int) -> Path:
    """Return the folder of a node's temporary data: etcd's data and the kubelet's folder."""
    return node_folder(node) / "running"


def cgroup(node: int) -> str:
    """Return the cgroup of a node's pods. The cgroup of its programs has the suffix ``-d``."""
    return f"sgr{node}"


def _containerd(node: int) -> str:
    folder = node_folder(node)
    unused = ["aufs", "btrfs", "devmapper", "zfs"]  # each only looks for kernel modules and complains
    disabled = json.dumps([f"io.containerd.snapshotter.v1.{name}" for name in unused])
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE (containers, some virtual machines) no pod sandbox starts otherwise.
    return f"""version = 2
root = "{store_folder(node)}/containerd"
state = "{RUN}/containerd"
disabled_plugins = {disabled}
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugin_folder()}"
    conf_dir = "{folder}/cni"
"""


def _cni(node: int) -> dict[str, object]:
    ipam = {
        "type": "host-local",
        "dataDir": str(RUN / "ipam"),
        "ranges": [[{"subnet": network.pods(node)}]],
        "routes": [{"dst": "10.0.0.0/8"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True}
    return {"cniVersion": "0.4.0", "name": "sgr", "plugins": [bridge, portmap]}


def _kubelet(node: int) -> dict[str, object]:
    pki = lab_root() / "pki"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.address(node),
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": str(pki / "ca.crt")}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / f"node{node}.crt"),
        "tlsPrivateKeyFile": str(pki / f"node{node}.key"),
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup(node)}",
        "enforceNodeAllocatable": ["pods"],
        "clusterDNS": [network.API],
        "clusterDomain": "cluster.local",
        "resolvConf": str(node_folder(node) / "resolv.conf"),
        "failSwapOn": False,
        "hairpinMode": "none",
        "maxOpenFiles": hard if 0 < hard < 1_000_000 else 1_000_000,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%"},
        "imageGCHighThresholdPercent": 100,
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "4s",
        "readOnlyPort": 0,
        "volumePluginDir": str(runtime_folder(node) / "volplugins"),
    }


def _proxy(node: int) -> dict[str, object]:
    untouched = {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"}
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": network.POD_RANGE,
        "clientConnection": {"kubeconfig": str(lab_root() / "pki" / "proxy.kubeconfig")},
        "conntrack": untouched,  # these sysctls are the machine's
        "hostnameOverride": f"node{node}",
        "bindAddress": network.address(node),
        "healthzBindAddress": f"{network.address(node)}:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "iptables": {"syncPeriod": "10s", "minSyncPeriod": "0s"},
    }


def _corefile() -> str:
    config = lab_root() / "pki" / "admin.kubeconfig"
    zone = f"kubernetes cluster.local in-addr.arpa {{\n  kubeconfig {config} sgr-lab\n  ttl 2\n }}"
    return f".:53 {{\n bind {network.API}\n errors\n {zone}\n ready {network.API}:8181\n}}\n"


def write(node: int) -> None:
    """Write all configuration files of a node."""
    folder = node_folder(node)
    for sub in ("cni", "logs", "store", "running"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    (folder / "containerd.toml").write_text(_containerd(node))
    (folder / "cni" / "10-sgr.conflist").write_text(json.dumps(_cni(node), indent=1))
    (folder / "kubelet.yaml").write_text(json.dumps(_kubelet(node), indent=1))  # JSON is YAML too
    (folder / "proxy.yaml").write_text(json.dumps(_proxy(node), indent=1))
    (folder / "resolv.conf").write_text(f"nameserver {network.API}\n")
    if node == 0:
        (folder / "Corefile").write_text(_corefile())
