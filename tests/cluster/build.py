"""Build the cluster's programs from Go modules, into a directory outside of git.

    python -m tests.cluster.build [--out build/cluster]

Needs Go and a module proxy, but not root. A cold build takes about 20 minutes on two cores. A program is built again
only when its module has changed.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
CHECKOUT: Final = HERE.parents[1]
DEFAULT_OUTPUT: Final = Path(os.environ.get("CLOISTER_CLUSTER_BUILD") or CHECKOUT / "build" / "cluster")
_PULUMI: Final = "v3.259.0"
_PULUMI_VERSION: Final = "github.com/pulumi/pulumi/sdk/v3/go/common/version.Version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program: its module's directory, its package there, additional linker flags, and build tags."""

    module: Path
    package: str
    linker: str = ""
    tags: str = ""

    def fingerprint(self) -> str:
        """Hash of everything that the program is built from."""
        files = [self.module / "go.mod", self.module / "go.sum", *sorted((self.module / "cmd").glob("*/*.go"))]
        texts = [path.read_bytes() for path in files] + [self.package.encode(), self.linker.encode()]
        texts += [self.tags.encode()] if self.tags else []
        return hashlib.sha256(b"\0".join(texts)).hexdigest()


_KUBERNETES: Final = "v1.35.3"
_GO: Final = HERE / "go"
_GO_ADDONS: Final = HERE / "go_addons"
PROGRAMS: Final = {
    "etcd": Program(module=_GO, package="./cmd/etcd"),
    **{
        name: Program(
            module=_GO,
            package=f"k8s.io/kubernetes/cmd/{name}",
            linker=f"-X k8s.io/component-base/version.gitVersion={_KUBERNETES}",
        )
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-proxy",
            "kube-scheduler",
            "kubectl",
            "kubelet",
        )
    },
    "otelcol": Program(module=HERE / "go_collector", package="./cmd/otelcol"),
    "coredns": Program(module=_GO_ADDONS, package="./cmd/coredns"),
    "kwok": Program(module=_GO_ADDONS, package="sigs.k8s.io/kwok/cmd/kwok"),
    "karpenter": Program(module=HERE / "go_karpenter", package="sigs.k8s.io/karpenter/kwok"),
    **{
        name: Program(
            module=HERE / "go_prometheus",
            package=f"github.com/prometheus/prometheus/cmd/{name}",
            # Without the clients of cloud providers, which find targets: tests name theirs.
            tags="remove_all_sd",
        )
        for name in ("prometheus", "promtool")
    },
    "versitygw": Program(module=_GO_ADDONS, package="github.com/versity/versitygw/cmd/versitygw"),
    "ray-operator": Program(module=_GO, package="github.com/ray-project/kuberay/ray-operator"),
    "pulumi": Program(
        module=HERE / "go_pulumi",
        package="github.com/pulumi/pulumi/pkg/v3/cmd/pulumi",
        linker=f"-X {_PULUMI_VERSION}={_PULUMI}",
    ),
}


def build(output: Path, names: Sequence[str] = tuple(PROGRAMS)) -> None:
    """Build the programs that are missing or whose module has changed.

    Args:
        output: programs are written to its directory ``bin``.
        names: keys of ``PROGRAMS``.

    Raises:
        subprocess.CalledProcessError: the build failed; Go writes the reason to standard error.
    """
    # Go runs in the directory of the module.
    directory = output.resolve() / "bin"
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        program = PROGRAMS[name]
        path, mark = directory / name, directory / f".{name}.built"
        if path.exists() and mark.exists() and mark.read_text() == program.fingerprint():
            continue
        sys.stderr.write(f"building {name} from {program.package}\n")
        command = ["go", "build", "-buildvcs=false", "-ldflags", f"-s -w {program.linker}".strip()]
        command += ["-tags", program.tags] if program.tags else []
        command += ["-o", str(path), program.package]
        subprocess.run(command, cwd=program.module, env=os.environ | {"CGO_ENABLED": "0"}, check=True)
        mark.write_text(program.fingerprint())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line that the module docstring describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.build", description="Builds the cluster's programs.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, help=f"default: {DEFAULT_OUTPUT}")
    try:
        build(parser.parse_args(arguments).out)
    except FileNotFoundError:
        sys.stderr.write("`go` is not on PATH; install Go 1.26 or newer, which builds the cluster's programs\n")
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
