"""Requirements of the cluster on this machine, and removal of everything that the cluster created.

Objects are found by place and name instead of a record, so they are also found after a crash. Only the original values
of changed settings (kernel settings, directories that existed before) are recorded.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.cluster.node.cgroups import cgroup_directories, remove_cgroup
from tests.cluster.node.iptables import chains, remove_chains
from tests.cluster.node.layout import NODES, PATH, RUN, STATE
from tests.cluster.node.namespaces import MOUNT_POINTS
from tests.cluster.node.network import CHAIN, SYSCTLS, bridges, remove_bridge, taken_networks

_PACKAGES: Final = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    # To build images.
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}
_PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
_OUR_PROGRAMS: Final = {*_PROGRAMS, "unshare", "nsenter", "containerd", "containerd-shim-runc-v2", "ctr"}
_KUBELETS: Final = {"kubelet", "kubelite", "k3s", "k0s"}
_RECORD: Final = STATE / "before.json"
# Additional settings that the kubelets, kube-proxy and the pods' network change.
KERNEL: Final = (
    *SYSCTLS,
    "kernel.keys.root_maxbytes",
    "kernel.keys.root_maxkeys",
    "kernel.panic",
    "kernel.panic_on_oops",
    "net.ipv4.conf.all.route_localnet",
    "vm.overcommit_memory",
    "vm.panic_on_oom",
)
# For files that pods write; images are links to files that are unpacked already.
_ROOM_GB: Final = 5
_MEMORY_GB: Final = 16
_KUBERNETES_CHAINS: Final = "KUBE-"
_GONE_WITHIN_S: Final = 30


class HostError(Exception):
    """The cluster cannot run here, or could not be removed; the message contains what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    pid: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return Path(self.arguments[0]).name

    @property
    def is_ours(self) -> bool:
        places = (str(STATE), str(RUN))
        return self.name in _OUR_PROGRAMS and any(f"{place}/" in each for each in self.arguments for place in places)


def lacking() -> str:
    """Return what the machine lacks for a real cluster and how to get it; empty if nothing."""
    if os.geteuid() != 0:
        return "a real cluster needs root (kubelets, containers, network devices): run it as root"
    if not _may_change_the_kernel():
        return "root cannot create mounts and network devices: this container lacks SYS_ADMIN or NET_ADMIN"
    missing = sorted({package for command, package in _PACKAGES.items() if shutil.which(command, path=PATH) is None})
    if missing:
        return f"Debian packages are missing; as root: apt-get install {' '.join(missing)}"
    with suppress(FileNotFoundError):
        # Most kernels have it as a module; in others it is built in, possibly without modprobe.
        subprocess.run(["modprobe", "br_netfilter"], check=False, stderr=subprocess.DEVNULL)
    if unknown := [name for name in SYSCTLS if not sysctl(name).exists()]:
        return f"the kernel lacks {unknown[0]}; load the module br_netfilter"
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return f"{memory_gb:.0f} GB of memory; a real cluster needs {_MEMORY_GB}" if memory_gb < _MEMORY_GB - 1 else ""


def why_not() -> str:
    """Return why the cluster cannot run here now and what to do about it; empty if it can."""
    if reason := lacking() or _lack_of_room():
        return reason
    if found := leftovers():
        return f"a cluster runs here, or one has crashed ({found[0]} exists); remove it: make cluster-down"
    if pids := [each.pid for each in _processes() if each.name in _KUBELETS]:
        return f"this machine runs a kubelet already (process {pids[0]}); use another machine"
    if found := chains((_KUBERNETES_CHAINS,)):
        return f"another Kubernetes has created the iptables chain {found[0]}; remove it, or use another machine"
    if taken := taken_networks():
        return f"the cluster's addresses are in use here by the route to {taken[0]}"
    return ""


def _lack_of_room() -> str:
    free_gb = shutil.disk_usage(STATE.parent).free // 10**9
    return f"{STATE.parent} has {free_gb} GB free; a real cluster needs {_ROOM_GB}" if free_gb < _ROOM_GB else ""


def missing_programs(programs: Path) -> str:
    """Return which programs of ``build.py`` are missing, in the form of ``why_not``.

    Args:
        programs: its ``bin`` directory.
    """
    missing = [name for name in _PROGRAMS if not (programs / name).exists()]
    return f"{programs} lacks {', '.join(missing)}; build them: python -m tests.cluster.build" if missing else ""


def prepare() -> None:
    """Record the kernel settings, change them, and create the directories.

    Raises:
        FileExistsError: another run has just done so.
    """
    STATE.mkdir(mode=0o711)
    try:
        _prepare()
    except BaseException:
        remove_everything()
        raise


def _prepare() -> None:
    made = [str(path) for path in MOUNT_POINTS if not path.exists()]
    kernel = {name: sysctl(name).read_text().strip() for name in KERNEL if sysctl(name).exists()}
    unfinished = _RECORD.with_suffix(".new")
    unfinished.write_text(json.dumps({"boot": _boot_id(), "directories": made, "kernel": kernel}))
    unfinished.rename(_RECORD)
    RUN.mkdir(mode=0o711)
    for path in MOUNT_POINTS:
        path.mkdir(parents=True, exist_ok=True)
    for name, value in SYSCTLS.items():
        sysctl(name).write_text(value)


def remove_everything() -> None:
    """Remove everything that a run may have created, also after a crash.

    Raises:
        HostError: something could not be removed, or this process is not root.
    """
    if os.geteuid() != 0 or not _may_change_the_kernel():
        raise HostError("only root can take a cluster away")
    _kill_processes()
    for node in NODES:
        remove_cgroup(node.cgroup)
    remove_chains(_our_chains())
    for bridge in bridges():
        remove_bridge(bridge)
    _restore()
    for mount in sorted(_mounts(), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)
    for directory in (RUN, STATE):
        if directory.exists():
            shutil.rmtree(directory)
    if found := leftovers():
        raise HostError(f"still there: {'; '.join(found)}")


def leftovers() -> list[str]:
    """Return what exists of a cluster now."""
    return [
        *(f"process {each.pid} ({' '.join(each.arguments)[:100]})" for each in _processes() if each.is_ours),
        *(f"mount {path}" for path in _mounts()),
        *(f"network device {name}" for name in bridges()),
        # Only users who may change iptables may read it.
        *(f"iptables chain {name}" for name in (chains(_our_chains()) if _may_change_the_kernel() else ())),
        *(f"cgroup {path}" for node in NODES for path in cgroup_directories(node.cgroup)),
        *(f"directory {path}" for path in (STATE, RUN) if path.exists()),
    ]


def _our_chains() -> tuple[str, ...]:
    """Return chains to remove. kube-proxy's carry no mark; the cluster starts only where none exist."""
    return (CHAIN, _KUBERNETES_CHAINS) if STATE.exists() and _is_of_this_boot(_record()) else (CHAIN,)


def _kill_processes() -> None:
    end = time.monotonic() + _GONE_WITHIN_S
    while running := [each for each in _processes() if each.is_ours]:
        if time.monotonic() > end:
            raise HostError(f"process {running[0].pid} ({running[0].name}) does not end")
        for each in running:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> Iterator[_Running]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Processes may end during the loop. A zombie has no command line.
        with suppress(FileNotFoundError, ProcessLookupError):
            if text := path.read_bytes().decode(errors="replace"):
                yield _Running(pid=int(path.parent.name), arguments=tuple(text.rstrip("\0").split("\0")))


def _mounts() -> list[str]:
    paths = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [path for path in paths if Path(path).is_relative_to(STATE) or Path(path).is_relative_to(RUN)]


def _restore() -> None:
    record = _record()
    # After a reboot the kernel has no objects of the cluster, and its settings may be someone else's.
    settings = record["kernel"] if _is_of_this_boot(record) else {}
    for name, value in settings.items():
        if sysctl(name).read_text().strip() != value:
            sysctl(name).write_text(value)
    for directory in map(Path, record["directories"]):
        # A directory that is not empty is in use by others: our files were visible in the nodes' namespaces only.
        if directory.exists() and not any(directory.iterdir()):
            directory.rmdir()


def _record() -> dict[str, Any]:
    """Return the recorded values; without a record nothing was changed."""
    nothing: dict[str, Any] = {"boot": _boot_id(), "directories": [], "kernel": {}}
    return json.loads(_RECORD.read_text()) if _RECORD.exists() else nothing


def _is_of_this_boot(record: Mapping[str, Any]) -> bool:
    return bool(record["boot"] == _boot_id())


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _may_change_the_kernel() -> bool:
    """Return whether this process has the capabilities NET_ADMIN (12) and SYS_ADMIN (21), see capabilities(7)."""
    status = Path("/proc/self/status").read_text()
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    return all(effective >> number & 1 for number in (12, 21))


def sysctl(name: str) -> Path:
    """Return the file of a kernel setting, e.g. ``net.ipv4.ip_forward``."""
    return Path("/proc/sys", *name.split("."))
