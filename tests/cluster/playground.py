"""A whole Kubernetes with the project's stack on this machine, to try things. Needs root.

    python -m tests.cluster.playground check
    python -m tests.cluster.playground images
    python -m tests.cluster.playground up
    python -m tests.cluster.playground status
    python -m tests.cluster.playground down

`check` reports what the machine lacks to run the cluster. `images` builds missing images, or reports why this machine
cannot build them. `up` builds what is missing, starts two real nodes, deploys the stack ``dev`` and prints how to use
it; the cluster keeps running when the command has ended. `down` removes everything, also after a crash.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import httpx

from ray_job.demo_model import make_demo_model
from tests.cluster.api import KubernetesApi
from tests.cluster.build import CHECKOUT, DEFAULT_OUTPUT, build
from tests.cluster.deployed import JOBS, MODEL
from tests.cluster.dev_stack import dev_stack
from tests.cluster.images.build import build_images
from tests.cluster.images.buildah import ImageBuildError
from tests.cluster.images.image import images_in
from tests.cluster.images.unpacking import ROOM_GB, is_unpacked
from tests.cluster.kuberay import install_crds
from tests.cluster.kuberay_operator import deploy_operator
from tests.cluster.node.host import HostError, lacking, leftovers, remove_everything, why_not
from tests.cluster.node.layout import KUBECONFIG, STATE
from tests.cluster.node.real_cluster import start_cluster
from tests.cluster.node.waiting import is_ready
from tests.cluster.readiness import pod_problem
from tests.cluster.whole_stack import DRAINED, add_drained_node, changed_sections, cluster_ip, first_key, upload_weights

_DEMO_MODEL: Final = CHECKOUT / "build" / "demo_model"
_PROGRAMS: Final = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "coredns",
    "versitygw",
    "ray-operator",
    "pulumi",
)
# While Ray's packages are built. 23 GB stay; a running cluster takes less than the difference.
_ROOM_TO_BUILD_GB: Final = 30
_USAGE: Final = """
The cluster runs until `make cluster-down`. In another shell:

export KUBECONFIG={kubeconfig} PATH={programs}:$PATH
kubectl get pods --all-namespaces

The stack's API answers on this machine:

export OPENAI_BASE_URL={base_url} OPENAI_API_KEY={api_key}
{python} - <<'END'
import json, time
from openai import OpenAI

client = OpenAI()
body = {{"model": "{model}", "messages": [{{"role": "user", "content": "What is a batch?"}}], "max_tokens": 16}}
line = {{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}}
file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint=line["url"], completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(5)
    batch = client.batches.retrieve(batch.id)
    print(batch.status)
print(client.files.content(batch.output_file_id).text)
END

What runs for it meanwhile:  kubectl --namespace {jobs} get rayjobs,pods
Another API key:             {first_key}
"""


def up(output: Path) -> None:
    """Start the cluster and deploy the stack.

    Args:
        output: directory for everything that is built.

    Raises:
        HostError: the machine cannot run the cluster; the message contains what to do.
    """
    check(output)
    report = _progress()
    programs = output / "bin"
    report("programs")
    build(output, _PROGRAMS)
    report("images")
    images = build_images(output / "images", programs)
    make_demo_model(_DEMO_MODEL)
    report("two nodes")
    cluster = start_cluster(programs, images)
    control_plane = cluster.control_plane
    directory = STATE / "stack"
    directory.mkdir()
    with (
        KubernetesApi(control_plane.kubeconfig) as api,
        dev_stack(control_plane, output, directory, **changed_sections(control_plane, images)) as deployment,
    ):
        report("KubeRay")
        install_crds(api)
        deploy_operator(api, images["ray-operator"].reference)
        add_drained_node(api, DRAINED)
        report("pulumi up")
        deployment.up()
        report("the model's weights, an API key")
        upload_weights(api, _DEMO_MODEL)
        api_key = first_key(deployment, control_plane)
        usage = _USAGE.format(
            kubeconfig=control_plane.kubeconfig,
            programs=programs,
            python=sys.executable,
            base_url=f"http://{cluster_ip(api, 'api')}/v1",
            api_key=api_key,
            model=MODEL,
            jobs=JOBS,
            first_key=deployment.stack.outputs()["first_key"].value,
        )
    sys.stdout.write(usage)


def check(output: Path) -> None:
    """Check that a real cluster can be built and run on this machine now.

    Args:
        output: directory for everything that is built.

    Raises:
        HostError: it cannot; the message contains what to do.
    """
    check_parts(output)
    if reason := why_not():
        raise HostError(reason)


def check_parts(output: Path) -> None:
    """Check for the build tools and for disk space, also while a cluster is running.

    Args:
        output: directory for everything that is built.

    Raises:
        HostError: something is missing; the message contains what to do.
    """
    if reason := lacking():
        raise HostError(reason)
    if shutil.which("go") is None:
        raise HostError("`go` is not on PATH; install Go 1.26 or newer, which builds the cluster's programs")
    output.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(output).free // 10**9
    if free_gb < (needed_gb := _room_to_build_gb(output / "images")):
        raise HostError(f"{output} has {free_gb} GB free; to build Ray's image and unpack it takes {needed_gb}, once")


def _room_to_build_gb(images: Path) -> int:
    if "ray-cpu" not in images_in(images / "layout"):
        return _ROOM_TO_BUILD_GB
    return 0 if is_unpacked(images) else ROOM_GB


def images(output: Path) -> None:
    """Build the images, or report why this machine cannot build them.

    Args:
        output: directory for everything that is built; the programs exist already.
    """
    try:
        check_parts(output)
    except HostError as error:
        sys.stderr.write(f"images and the tests that need them are skipped: {error}\n")
    else:
        build_images(output / "images", output / "bin")


def down() -> None:
    """Remove everything of the cluster.

    Raises:
        HostError: something could not be removed; the message names it.
    """
    report = _progress()
    report("removing processes, mounts, network, rules and files")
    remove_everything()
    report("removed")


def status() -> None:
    """Print the nodes and pods of the cluster, or what is left of one."""
    try:
        lines = _nodes_and_pods() if KUBECONFIG.exists() else leftovers()
    except httpx.TransportError as error:
        lines = [f"the API server does not answer ({error}); what is there:", *leftovers()]
    sys.stdout.write("\n".join(lines or ["no cluster"]) + "\n")


def _nodes_and_pods() -> list[str]:
    with KubernetesApi(KUBECONFIG) as api:
        nodes = [
            f"node {node['metadata']['name']}: {'ready' if is_ready(node) else 'not ready'}"
            for node in api.list("v1", "Node")
        ]
        pods = [
            f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}: {pod_problem(pod) or 'ready'}"
            for pod in api.list("v1", "Pod")
        ]
    return [*nodes, *pods]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line that the module docstring describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.playground", description="A cluster to play with.")
    parser.add_argument("command", choices=("check", "images", "up", "down", "status"))
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, help=f"what is built; default: {DEFAULT_OUTPUT}")
    given = parser.parse_args(arguments)
    output = given.out.resolve()
    commands = {
        "check": lambda: check(output),
        "images": lambda: images(output),
        "up": lambda: up(output),
        "down": down,
        "status": status,
    }
    try:
        commands[given.command]()
    except (HostError, ImageBuildError) as error:
        # The caller of `check` reads the reason from standard output.
        (sys.stdout if given.command == "check" else sys.stderr).write(f"{error}\n")
        return 1
    return 0


def _progress() -> Callable[[str], object]:
    """Return a function that prints a step to standard error with the seconds since the start."""
    start = time.monotonic()
    return lambda step: sys.stderr.write(f"[{time.monotonic() - start:4.0f} s] {step}\n")


if __name__ == "__main__":
    sys.exit(main())
