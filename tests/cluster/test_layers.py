"""A platform and its customers: the stacks of the documentation side by side, customers and the platform destroyed.

KubeRay's real operator runs their jobs, with its rights in the namespaces of jobs only. kwok simulates the nodes.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from pulumi import automation

from ray_job.contract.rayjobs import MODEL_ANNOTATION
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.rayjobs_api import RayJobsApi, open_client
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane, kuberay_operator
from tests.cluster.deployed import TOKEN, job_spec
from tests.cluster.dev_stack import Deployment, dev_stack
from tests.cluster.gpu_pools.gpu_stack import eventually
from tests.cluster.gpu_pools.kwok import ANNOTATION, kwok
from tests.cluster.kuberay import operator_account
from tests.cluster.nodes import add_node, wait_until_untainted
from tests.infra.previewed_stacks import ROOT

pytestmark = [
    pytest.mark.cluster,
    # Pulumi's Automation API leaves the event loop of a failed program to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CUSTOMERS: Final = ("acme", "globex", "hooli")
LISTED: Final = [{"customer": name, "environment": "prod"} for name in CUSTOMERS]
STACKS: Final = ROOT / "docs" / "stacks"
# The states of the stacks are in different directories.
PLATFORM: Final = {"kuberay_namespace": "kuberay-system"}


@pytest.fixture(scope="module")
def stacks(
    cluster: ControlPlane, api: KubernetesApi, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Deployment]]:
    """The platform and three customers on it; the tests follow the order of their life."""

    def directory(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    with ExitStack() as opened:
        made = {
            "platform": opened.enter_context(
                dev_stack(
                    cluster,
                    programs,
                    directory("platform"),
                    file=STACKS / "Pulumi.platform.yaml",
                    customers=[*LISTED[:2], {**LISTED[2], "nodes": ["gpu-4"]}],
                )
            )
        }
        for name in CUSTOMERS:
            sections: dict[str, Any] = {"customer": name, "platform": PLATFORM, "keep_data": False}
            host = {"host": f"batch.{name}.example", "controller": "traefik", "tls": {"cluster_issuer": "host-ca"}}
            file = STACKS / "Pulumi.customer-acme.yaml"
            made[name] = opened.enter_context(
                dev_stack(cluster, programs, directory(name), file=file, api={"ingress": host}, **sections)
            )
        pools = made["platform"].values["node_pools"]
        for node in [node for pool in pools.values() if isinstance(pool, dict) for node in pool["nodes"]]:
            if api.find("v1", "Node", node) is None:
                opened.callback(api.delete, "v1", "Node", node)
                add_node(api, node, {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "1"}, {ANNOTATION: "fake"})
                wait_until_untainted(api, node)
        for each in made.values():
            each.up()
        yield made


@pytest.fixture(scope="module")
def heads(stacks: Mapping[str, Deployment], cluster: ControlPlane, api: KubernetesApi) -> Iterator[Mapping[str, str]]:
    """UIDs of the running heads of one job of each customer."""
    assert stacks["platform"].warnings == []
    watched = [f"cloister-{name}-prod-jobs" for name in CUSTOMERS]
    with (
        operator_account(api, watched) as token,
        kwok(cluster),
        kuberay_operator(cluster, token=token, watched=watched),
    ):
        for number, name in enumerate(CUSTOMERS, 31):
            launch(cluster, api, name, number)
        yield {name: eventually(lambda name=name: head(api, name)) for name in CUSTOMERS}


def launch(cluster: ControlPlane, api: KubernetesApi, customer: str, number: int) -> None:
    """Launch a job of a customer's first model, as the reconciler does."""
    service = f"cloister-{customer}-prod"
    found = api.find("v1", "ConfigMap", "ray-job-templates", service)
    assert found is not None
    template = json.loads(next(iter(found["data"].values())))
    model = template["metadata"]["annotations"][MODEL_ANNOTATION]
    token = api.token("reconciler", service)
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=f"reconciler-{customer}", token=token)
    rayjobs = RayJobsApi(open_client(kubeconfig), f"{service}-jobs")
    with KubeRayLauncher(rayjobs, {model: template}) as launcher:
        launcher.launch(job_spec(number, model=model), TOKEN)


def head(api: KubernetesApi, customer: str) -> str:
    """Return the UID of the running head of a customer's job; empty if there is none."""
    pods = api.list("v1", "Pod", f"cloister-{customer}-prod-jobs")
    found = [
        pod["metadata"]["uid"]
        for pod in pods
        if pod["metadata"]["labels"].get("ray.io/node-type") == "head" and pod["status"].get("phase") == "Running"
    ]
    return found[0] if found else ""


def test_each_customer_is_in_the_register(stacks: Mapping[str, Deployment], api: KubernetesApi) -> None:
    assert stacks["platform"].warnings == []
    assert register(api) == {f"cloister-{name}-prod-jobs": f"{name}-prod" for name in CUSTOMERS}
    for each in stacks.values():
        assert each.planned(refresh=True) == {}


def test_platform_with_customers_is_destroyed_in_no_part(stacks: Mapping[str, Deployment], api: KubernetesApi) -> None:
    with pytest.raises(automation.CommandError, match=r"acme-prod.* use this platform; destroy the stacks"):
        stacks["platform"].destroy()
    assert {node: label(api, node) for node in ("cpu-1", "gpu-4")} == {"cpu-1": "cpu", "gpu-4": "a10g"}
    assert set(namespaces(api)) >= {f"cloister-{name}-prod-jobs" for name in CUSTOMERS} | {"cloister-platform"}


def test_customer_removed_from_the_platform_too_early_keeps_its_jobs(
    stacks: Mapping[str, Deployment], api: KubernetesApi
) -> None:
    refused = pytest.raises(automation.CommandError, match="it runs the jobs of a customer that uses this platform")
    with stacks["platform"].changed(customers=LISTED[1:]), refused:
        stacks["platform"].up()
    assert "cloister-acme-prod-jobs" in namespaces(api)
    stacks["platform"].up()
    assert stacks["acme"].planned(refresh=True) == {}


def test_destroyed_customer_leaves_the_others_and_their_jobs_unchanged(
    stacks: Mapping[str, Deployment], api: KubernetesApi, heads: Mapping[str, str]
) -> None:
    stacks["globex"].destroy()
    assert {name: head(api, name) for name in CUSTOMERS} == {**heads, "globex": ""}
    assert set(register(api)) == {"cloister-acme-prod-jobs", "cloister-hooli-prod-jobs"}
    assert stacks["acme"].planned(refresh=True) == {}
    assert stacks["hooli"].planned(refresh=True) == {}
    stacks["platform"].values["customers"] = [each for each in LISTED if each["customer"] != "globex"]
    stacks["platform"].up()
    assert [name for name in namespaces(api) if "globex" in name] == []


def test_platform_without_customers_is_destroyed(stacks: Mapping[str, Deployment], api: KubernetesApi) -> None:
    for name in ("acme", "hooli"):
        stacks[name].destroy()
    stacks["platform"].destroy()
    assert namespaces(api) == []
    assert label(api, "cpu-1") is None


def register(api: KubernetesApi) -> dict[str, str]:
    found = api.find("v1", "ConfigMap", "customers", "cloister-platform")
    return dict((found or {}).get("data") or {})


def namespaces(api: KubernetesApi) -> list[str]:
    names = (each["metadata"]["name"] for each in api.list("v1", "Namespace"))
    return [name for name in names if name.startswith("cloister-")]


def label(api: KubernetesApi, node: str) -> str | None:
    found = api.find("v1", "Node", node)
    assert found is not None
    labels: dict[str, str] = found["metadata"].get("labels", {})
    return labels.get("cloister.dev/pool")
