"""All checks with pods, at the same time, in temporary namespaces."""

import base64
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from ray_job.contract.cluster import jobs_namespace
from service.doctor.cluster_api import ClusterApi
from service.doctor.findings import Finding, Result, run_check
from service.doctor.preflight.choices import Preflight
from service.doctor.preflight.gpus import check_pool_nodes
from service.doctor.preflight.images import check_pool_image
from service.doctor.preflight.network import check_network
from service.doctor.preflight.requirements import check_gateway, check_ingress, check_storage_binds
from service.doctor.preflight.stack_facts import StackFacts
from service.doctor.preflight.temporary_pods import Cluster, check_leftovers, temporary_namespace

PASSWORD_VARIABLE: Final = "CLOISTER_REGISTRY_PASSWORD"  # noqa: S105 - a name
_SEVERITY: Final = (Result.FAILED, Result.WARNING, Result.NOT_CHECKED, Result.OK)


def check_with_pods(
    api: ClusterApi, facts: StackFacts, kubectl: Sequence[str], preflight: Preflight
) -> Iterator[Finding]:
    """Run all checks with pods, and remove the pods.

    Args:
        api: the cluster.
        facts: values of the stack file.
        kubectl: the command with kubeconfig and context.
        preflight: the choices.

    Yields:
        The findings, the most severe first.
    """
    cluster = Cluster(api=api, kubectl=kubectl)
    findings = list(run_check("temporary pods", check_leftovers, api, jobs_namespace(facts.namespace)))
    docker_config = _docker_config(facts)
    if facts.registry and not docker_config:
        findings.append(
            Finding.not_checked(
                "images.pull_secret",
                f"set {PASSWORD_VARIABLE} to the password of {facts.registry[1]}; images are pulled without it",
            )
        )
    with (
        temporary_namespace(api, purpose="peers", docker_config=docker_config) as peers,
        temporary_namespace(api, purpose="stack", docker_config=docker_config) as sources,
    ):
        checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
            ("nodes of the pools", lambda: check_pool_nodes(api, facts)),
            ("ingress", lambda: check_ingress(api, facts)),
            ("gateway", lambda: check_gateway(api, facts)),
            ("volumes of the stack", lambda: check_storage_binds(cluster, facts, peers)),
            (
                "network",
                lambda: check_network(
                    cluster, facts, peers=peers, sources=sources, external=preflight.external, report=preflight.report
                ),
            ),
        ]
        for pool in facts.pools:
            for number, image in enumerate(pool.images, start=1):
                check = partial(
                    check_pool_image, cluster, facts, pool, image, namespace=peers, gpu=preflight.gpu, number=number
                )
                checks.append((f"images of {pool.name}", check))
        with ThreadPoolExecutor(max_workers=len(checks)) as threads:
            try:
                started = [threads.submit(lambda each: list(run_check(*each)), each) for each in checks]
                findings += [finding for future in started for finding in future.result()]
            finally:
                # After Ctrl-C the threads that wait for pods would hold the process.
                cluster.ended.set()
    yield from sorted(findings, key=lambda finding: _SEVERITY.index(finding.result))


def _docker_config(facts: StackFacts) -> str:
    """Return the content of the pull secret; empty if none is needed or its password is not set."""
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if not (facts.registry and password):
        return ""
    registry, username = facts.registry
    token = base64.b64encode(f"{username}:{password}".encode()).decode()
    return json.dumps({"auths": {registry: {"auth": token}}})
