"""Images on the nodes of each pool: whether they can be pulled, in which time, and the GPU of the pod if wanted."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from service.doctor.findings import Finding
from service.doctor.preflight import gpu_program
from service.doctor.preflight.clocks import clock_finding
from service.doctor.preflight.gpus import gpu_findings
from service.doctor.preflight.stack_facts import Pool, StackFacts
from service.doctor.preflight.temporary_pods import PROBE, PULL_SECRET, Cluster, PodError, TestPod

_GPU_PROGRAM: Final = Path(gpu_program.__file__).read_text(encoding="utf-8")
_KUBERNETES: Final = ("kubernetes.default.svc", 443)
# "Successfully pulled image "…" in 1m2.5s (1m3s including waiting). Image size: 123 bytes."
_PULLED: Final = re.compile(r" in (?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>[\d.]+)s|(?P<ms>[\d.]+)ms)? \(")
_SIZE: Final = re.compile(r"Image size: (\d+) bytes")


def pull_duration_s(message: str) -> float | None:
    """Return the duration in the message of a kubelet's event ``Pulled``, in seconds; None if nothing was pulled."""
    match = _PULLED.search(message)
    if not match:
        return None
    hours, minutes, seconds, milliseconds = (float(match[unit] or 0) for unit in ("h", "m", "s", "ms"))
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def check_pool_image(
    cluster: Cluster, facts: StackFacts, pool: Pool, image: str, *, namespace: str, gpu: bool, number: int
) -> Iterator[Finding]:
    """Start a pod with an image on a node of a pool, and measure the pull.

    Args:
        cluster: the cluster.
        facts: values of the stack file.
        pool: the pool.
        image: the image.
        namespace: a temporary namespace.
        gpu: whether the pod requests a GPU and computes on it.
        number: distinguishes the images of a pool.
    """
    short = image.partition("@")[0].rpartition("/")[2]
    check = f"image {short} in {pool.name}"
    selector = ",".join(f"{key}={value}" for key, value in pool.labels.items())
    labelled = cluster.api.items("/api/v1/nodes", labelSelector=selector)
    node = next(iter((*pool.nodes, *(each["metadata"]["name"] for each in labelled))), "")
    if not node:
        yield Finding.not_checked(check, "the pool has no node now; its autoscaler creates them")
        return
    accelerator = pool.accelerator if gpu else None
    name = f"image-{pool.name}-{number}"
    pod = TestPod(
        name=name,
        image=image,
        node=node,
        runtime_class=pool.runtime_class if accelerator else "",
        gpu_resource=accelerator.resource if accelerator else "",
        pull_secrets=(PULL_SECRET,) if facts.registry else (),
    )
    cluster.start(namespace, pod)
    try:
        cluster.wait_until_running(namespace, name, limit_s=facts.start_limit_s)
    except PodError as problem:
        advice = (
            "Check `images`, `images.mirror`, `images.pull_secret` and the node's route to the registry"
            if problem.is_pull
            else f"`jobs.start_limit_s` is {facts.start_limit_s}"
        )
        yield Finding.failed(check, f"on {node}: {problem}. {advice}")
        return
    events = cluster.api.items(
        f"/api/v1/namespaces/{namespace}/events", fieldSelector=f"involvedObject.name={name},reason=Pulled"
    )
    message = str(events[0].get("message", "")) if events else ""
    yield pull_finding(check, node, message, limit_s=facts.start_limit_s)
    clock = json.dumps({"targets": [], "clock": [_KUBERNETES]})
    skew_s = cluster.python(namespace, name, PROBE, "connect", clock)["skew_s"]
    yield clock_finding(f"clock of {node}", skew_s)
    if accelerator:
        dtype = "bfloat16" if "bfloat16" in accelerator.dtypes else "float16"
        yield from gpu_findings(pool, accelerator, cluster.python(namespace, name, _GPU_PROGRAM, dtype))


def pull_finding(check: str, node: str, message: str, *, limit_s: int) -> Finding:
    """Compare the duration of a pull with the time limit of a job's start.

    Args:
        check: the subject of the finding.
        node: name of the node.
        message: message of the event ``Pulled``.
        limit_s: the time limit, in seconds.
    """
    seconds, size = pull_duration_s(message), _SIZE.search(message)
    if seconds is None:
        return Finding.ok(check, f"{node} has it already, so the pull is not measured")
    found = f"{node} pulled it in {seconds:,.0f} s" + (f" ({int(size[1]) / 1024**3:.1f} GiB)" if size else "")
    if seconds > limit_s:
        return Finding.failed(check, f"{found}; raise `jobs.start_limit_s`, now {limit_s}, or use a nearer registry")
    if seconds > limit_s / 2:
        return Finding.warning(check, f"{found}, more than half of `jobs.start_limit_s`, {limit_s}: raise it")
    return Finding.ok(check, f"{found}; `jobs.start_limit_s` is {limit_s}")
