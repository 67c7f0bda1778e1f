"""A killed run leaves much behind, blocks another run, and is removed by one command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.images.image import Image
from tests.cluster.node import host
from tests.cluster.node.host import KERNEL, HostError, leftovers, remove_everything, sysctl
from tests.cluster.node.iptables import chains, removal
from tests.cluster.node.real_cluster import real_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("root")]

# Only images that a node itself needs.
RUN = """
import sys, time
from pathlib import Path
from tests.cluster.images.image import images_in
from tests.cluster.node.real_cluster import real_cluster

images = images_in(Path(sys.argv[2]))
with real_cluster(Path(sys.argv[1]), {name: images[name] for name in ("pause", "coredns")}):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def crashed(programs: Path, images: Mapping[str, Image]) -> Iterator[Mapping[str, str]]:
    """State of the machine before a run that was killed."""
    before = machine()
    command = [sys.executable, "-c", RUN, str(programs / "bin"), str(images["pause"].layout)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.kill()
    run.communicate()
    yield before
    remove_everything()


def machine() -> dict[str, str]:
    """Return the kernel settings and network devices."""
    settings = {name: sysctl(name).read_text() for name in KERNEL if sysctl(name).exists()}
    return settings | {path.name: "network device" for path in Path("/sys/class/net").iterdir()}


def test_one_command_removes_the_remains_of_a_killed_run(crashed: Mapping[str, str], programs: Path) -> None:
    left = " ".join(leftovers())
    assert all(kind in left for kind in ("process", "network device", "iptables chain KUBE-", "cgroup", "directory"))
    with pytest.raises(HostError, match="make cluster-down"), real_cluster(programs / "bin", {}):
        pass
    subprocess.run([sys.executable, "-m", "tests.cluster.playground", "down"], check=True)
    assert leftovers() + chains(("KUBE-",)) == []
    assert machine() == crashed


def test_record_of_an_earlier_boot_changes_no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "before.json"
    record.write_text(json.dumps({"boot": "another", "directories": [], "kernel": {"net.of.a.module": "0"}}))
    monkeypatch.setattr(host, "_RECORD", record)
    assert leftovers() == []
    remove_everything()


def test_cluster_does_not_start_beside_a_kubelet(programs: Path) -> None:
    with subprocess.Popen(["kubelet", "60"], executable="/bin/sleep") as other:
        try:
            with pytest.raises(HostError, match=f"process {other.pid}"), real_cluster(programs / "bin", {}):
                pass
        finally:
            other.kill()


def test_missing_programs_are_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"lacks etcd.*python -m tests\.cluster\.build"), real_cluster(tmp_path, {}):
        pass


def test_only_our_chains_and_the_rules_that_jump_to_them_are_removed() -> None:
    saved = [
        "*filter",
        ":FORWARD DROP [0:0]",
        ":OTHER - [0:0]",
        ":KUBE-FORWARD - [0:0]",
        '-A FORWARD -m comment --comment "to KUBE-FORWARD" -j OTHER',
        "-A FORWARD -j KUBE-FORWARD",
        "-A KUBE-FORWARD -j ACCEPT",
        "COMMIT",
        "*raw",
        ":OUTPUT ACCEPT [0:0]",
        "COMMIT",
    ]
    assert removal(saved, ("KUBE-",)) == [
        "*filter",
        "-D FORWARD -j KUBE-FORWARD",
        "-F KUBE-FORWARD",
        "-X KUBE-FORWARD",
        "COMMIT",
        "*raw",
        "COMMIT",
    ]
