"""Hosts without Kubernetes on this machine: each a real SSH server with its own network, processes and files.

A host's root directory is an overlay of this machine's. RKE2, systemd and the tools that show or change the kernel are
stand-ins (``hosts/``). Everything ends with the processes, which the kernel ends together with the test run.
"""

import contextlib
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

_STAND_INS: Final = Path(__file__).parent / "hosts"
# For tests of network devices: RFC 2544.
_NETWORK: Final = "198.18.77"
_FIRST: Final = 11
_DEVICE: Final = "cl-hosts"
# Some kernels have no bridges. The setting is that of the router's network.
_ROUTER: Final = 'echo 1 >/proc/sys/net/ipv4/ip_forward; touch "$0"; exec cat'
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STARTED_WITHIN_S: Final = 60
VERSION: Final = "v1.34.5+rke2r1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Some hosts in one network.

    Attributes:
        shared: directory that all hosts see as ``/srv/cluster``; RKE2's stand-in records there what happens.
        files: directory with the files of RKE2's stand-in.
        hosts: the first process of each host by name.
    """

    shared: Path
    files: Path
    hosts: dict[str, subprocess.Popen[bytes]]

    def machine(self, name: str, **keys: Any) -> dict[str, Any]:
        """Return the entry of a host in a stack file."""
        key = (self.shared / "ssh" / f"{name}.pub").read_text().rpartition(" ")[0]
        return {"name": name, "address": self.address(name), "host_key": key, **keys}

    def address(self, name: str) -> str:
        return f"{_NETWORK}.{_FIRST + list(self.hosts).index(name)}"

    @property
    def private_key(self) -> str:
        return (self.shared / "ssh" / "user").read_text()

    def digests(self) -> dict[str, str]:
        return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(self.files.iterdir())}

    def log(self) -> list[str]:
        """What RKE2's stand-ins did since the last call, in order."""
        path = self.shared / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return lines

    def nodes(self) -> list[str]:
        """Names of the nodes of RKE2's stand-in."""
        return sorted(path.name for path in (self.shared / "nodes").iterdir())

    def exists(self, name: str, path: str) -> bool:
        """Whether a host has a file."""
        return self.on(name, "sh", "-c", f"[ -e {path} ] && echo yes || true").strip() == "yes"

    def on(self, name: str, *command: str) -> str:
        """Run a command on a host."""
        place = [f"--target={_child(self.hosts[name])}", "--mount", "--net", "--pid", "--root", "--wd=/"]
        return subprocess.run(["nsenter", *place, *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def lacking() -> str:
    """Return what the machine lacks for hosts and how to get it; empty if nothing."""
    if os.geteuid() != 0:
        return "hosts need root (network devices, mounts): run it as root"
    missing = [
        name for name in ("sshd", "ssh", "openssl", "curl", "ip", "nsenter") if shutil.which(name, path=_PATH) is None
    ]
    return f"{', '.join(missing)} is missing; as root: make cluster-packages" if missing else ""


def _child(process: subprocess.Popen[bytes]) -> int:
    """Process id of the first process inside the namespaces."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


@contextlib.contextmanager
def ssh_hosts(directory: Path, names: tuple[str, ...]) -> Iterator[Lab]:
    """Run hosts with SSH servers, connected with each other and this machine.

    Args:
        directory: an empty directory.
        names: names of the hosts.
    """
    shared, files = directory / "shared", directory / "files"
    for path in (shared / "ssh", files):
        path.mkdir(parents=True)
    _make_keys(shared / "ssh", names)
    _make_release(files)
    lab = Lab(shared=shared, files=files, hosts={})
    with contextlib.ExitStack() as stack:
        router = _held(stack, ["unshare", "--net", "sh", "-ec", _ROUTER, str(shared / "up")])
        _wait((shared / "up").exists)
        _connect(router.pid, _DEVICE, None, 1)
        for number, name in enumerate(names):
            place = directory / name
            place.mkdir()
            start = ["sh", str(_STAND_INS / "start.sh"), str(place), name, str(shared), str(_STAND_INS)]
            unshare = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
            lab.hosts[name] = _held(stack, [*unshare, *start])
            _wait((shared / f"up-{name}").exists)
            _connect(router.pid, "eth0", _child(lab.hosts[name]), _FIRST + number)
        yield lab


def _held(stack: contextlib.ExitStack, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, however this one ends."""
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdin is not None
    stack.callback(process.stdin.close)
    return process


def _connect(router: int, device: str, process: int | None, number: int) -> None:
    """Connect the network of a process, or this machine's, with the router. The device ends with either network."""
    address, port, gateway = f"{_NETWORK}.{number}", f"p{number}", f"{_NETWORK}.254"
    add = f"ip link add {port} type veth peer name {device} netns {process or os.getpid()}"
    up = f"ip address add {gateway}/32 dev {port}; ip link set {port} up; ip route add {address}/32 dev {port}"
    subprocess.run(["nsenter", f"--target={router}", "--net", "sh", "-ec", f"{add}; {up}"], check=True)
    inside = ["nsenter", f"--target={process}", "--net"] if process else []
    up = f"ip address add {address}/32 dev {device}; ip link set {device} up; ip route add {gateway}/32 dev {device}"
    route = f"ip route add {_NETWORK}.0/24 via {gateway} src {address}"
    subprocess.run([*inside, "sh", "-ec", f"{up}; {route}"], check=True)


def _wait(is_true: Any) -> None:
    end = time.monotonic() + _STARTED_WITHIN_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _make_keys(directory: Path, names: tuple[str, ...]) -> None:
    for name in ("user", *names):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(directory / name)]
        subprocess.run(command, check=True)
    tls = ["-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.pem")]
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run([*request, "-subj", "/CN=rke2", *tls], check=True, stderr=subprocess.DEVNULL)


def _make_release(files: Path) -> None:
    release = _STAND_INS / "release"
    (files / "install.sh").write_bytes((release / "install.sh").read_bytes())
    with tarfile.open(files / "rke2.linux-amd64.tar.gz", "w:gz") as archive:
        for part in ("bin", "share"):
            archive.add(release / part, arcname=part)
    for name in (
        "sha256sum-amd64.txt",
        "rke2-images-core.linux-amd64.tar.zst",
        "rke2-images-canal.linux-amd64.tar.zst",
    ):
        (files / name).write_text(f"{name} of the stand-in\n")
