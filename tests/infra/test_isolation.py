"""Stacks that share a cluster, a Postgres server and a bucket are isolated from each other."""

import dataclasses
import itertools
from typing import Any

import pulumi
import pytest

from infra.kubernetes.naming import StackNames
from infra.policy.pod_checks import pods
from infra.rendering.manifests import manifests, with_templates
from infra.rendering.recording import RecordedResource, Recording, record
from infra.shared_platform.outputs import platform_of
from infra.stack_file.cluster_sections import PlatformSection
from tests.infra.previewed_stacks import changed, customer_text, preview, preview_values

CUSTOMERS = FIRST, SECOND = "acme", "globex"


def preview_of(customer: str) -> Recording:
    text = customer_text(customer)
    return preview_values(text.values, text.secret_keys)


def identity(resource: RecordedResource) -> tuple[str, str, str]:
    metadata = resource.inputs.get("metadata") or {}
    return resource.type, metadata.get("namespace", ""), metadata.get("name", resource.name)


def objects(recording: Recording) -> dict[tuple[str, str, str], RecordedResource]:
    return {
        identity(resource): resource
        for resource in recording.resources
        if resource.custom and not resource.type.startswith("pulumi:")
    }


def test_stacks_of_customers_have_no_common_object_but_the_register() -> None:
    common = objects(preview_of(FIRST)).keys() & objects(preview_of(SECOND)).keys()
    assert {(namespace, name) for _, namespace, name in common} == {("cloister-platform", "customers")}
    keys = [preview_of(customer).of_type("ConfigMapPatch")[0].inputs["data"] for customer in CUSTOMERS]
    assert keys == [{f"cloister-{customer}-prod-jobs": f"{customer}-prod"} for customer in CUSTOMERS]


def test_platform_and_its_customers_have_no_common_object() -> None:
    platform = objects(preview("platform"))
    for customer in CUSTOMERS:
        assert platform.keys() & objects(preview_of(customer)).keys() == set()


def test_stacks_of_one_cluster_share_no_secret() -> None:
    text = customer_text(SECOND)
    secrets = {key: f"other-{key}".replace("_", "-") for key in text.secret_keys}
    secrets |= {"encryption_keys": f"{'k' * 43}=", "receipt_key": "ab" * 32}
    ours = {leaf for each in preview_of(FIRST).of_type("Secret") for leaf in each.inputs["stringData"].values()}
    theirs = preview_values({**text.values, **secrets}, text.secret_keys).of_type("Secret")
    assert theirs
    assert not ours & {leaf for each in theirs for leaf in each.inputs["stringData"].values()}


@pytest.mark.parametrize("names", [(FIRST, SECOND), (SECOND, FIRST)])
def test_resources_do_not_refer_to_the_other_stack(names: tuple[str, str]) -> None:
    mine, other = names
    for resource in preview_of(mine).resources:
        assert f"cloister-{other}" not in str(resource.inputs), (mine, resource.name)


def test_cluster_scoped_names_contain_the_stack() -> None:
    for kind, namespace, name in objects(preview_of(SECOND)):
        assert namespace or name.startswith("cloister-globex-prod"), (kind, name)


def test_only_the_platform_manages_nodes_and_installs_kuberay() -> None:
    kinds = [
        {resource.type.rpartition(":")[2] for resource in recording.resources}
        for recording in (preview("platform"), preview_of(FIRST))
    ]
    assert {"NodePatch", "Chart"} <= kinds[0]
    assert not {"NodePatch", "Chart", "DaemonSet"} & kinds[1]


def test_operator_watches_the_jobs_of_the_customers_only() -> None:
    (chart,) = preview("platform").of_type("Chart")
    jobs = [f"cloister-{customer}-prod-jobs" for customer in CUSTOMERS]
    assert chart.inputs["values"]["watchNamespace"] == jobs
    # The operator restarts again and again if one of them is missing.
    assert {f"{name}" for name in jobs} <= {urn.rpartition("::")[2] for urn in chart.dependencies}


def test_register_is_deleted_before_everything_else_of_the_platform() -> None:
    recording = preview("platform")
    register = recording.named("customers")
    others = {each.urn for each in recording.resources if each.custom and each is not register}
    assert others - set(register.dependencies) == {
        each.urn for each in recording.of_type("pulumi:providers:kubernetes")
    }


def test_customer_leaves_the_register_last() -> None:
    recording = preview_of(FIRST)
    register = recording.named("customers")
    for resource in recording.resources:
        if resource.custom and resource is not register and not resource.type.startswith("pulumi:"):
            assert register.urn in resource.dependencies, resource.name


def test_pods_of_a_customer_with_own_nodes_run_there_only() -> None:
    text = customer_text(FIRST)
    values = {**text.values, "isolation": "nodes"}
    found = 0
    for manifest in with_templates(manifests(preview_values(values, text.secret_keys))):
        for _, spec in pods(manifest):
            found += 1
            assert spec["nodeSelector"]["cloister.dev/customer"] == FIRST, manifest.title
            taint = {"key": "cloister.dev/customer", "operator": "Equal", "value": FIRST, "effect": "NoSchedule"}
            assert taint in spec["tolerations"], manifest.title
    assert found > len(CUSTOMERS)


def test_nodes_of_one_customer_have_its_label_and_taint() -> None:
    customers = [{"customer": FIRST, "environment": "prod", "nodes": ["gpu-3"]}]
    recording = preview_values(changed("platform", customers=customers), frozenset())
    nodes = {each.inputs["metadata"]["name"]: each.inputs for each in recording.of_type("NodePatch")}
    assert nodes["gpu-3"]["metadata"]["labels"] == {"cloister.dev/pool": "a10g", "cloister.dev/customer": FIRST}
    taints = [[taint["key"] for taint in nodes[name]["spec"]["taints"]] for name in ("gpu-3", "gpu-4")]
    assert taints == [["nvidia.com/gpu", "cloister.dev/customer"], ["nvidia.com/gpu"]]


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ({}, "is not the stack of a platform"),
        (
            {"kuberay_namespace": "kuberay", "jobs_namespaces": ["cloister-hooli-dev-jobs"]},
            "does not know customer acme",
        ),
    ],
)
def test_customer_that_the_platform_does_not_know_is_refused(outputs: dict[str, Any], problem: str) -> None:
    text = customer_text(FIRST)
    section = PlatformSection(stack="organization/cloister/platform")
    names = StackNames(customer=FIRST, environment="prod")

    def program() -> None:
        pulumi.export("namespace", platform_of(section, names).kuberay_namespace)

    with pytest.raises(pulumi.RunError, match=problem):
        record(program, references={str(text.values["platform"]["stack"]): outputs})


def test_roles_databases_buckets_and_prefixes_differ_between_stacks() -> None:
    stacks = [StackNames(customer=customer, environment="prod") for customer in ("acme", "globex")]
    fields = ("database", "bucket", "object_prefix", "service_namespace", "jobs_namespace", "instance")
    for field in fields:
        assert getattr(stacks[0], field) != getattr(stacks[1], field)


def test_names_of_stacks_never_collide() -> None:
    customers, environments = ("a", "a-b", "a-b-c", "a-jobs", "b"), ("b", "c", "dev", "jobs2")
    seen: dict[str, Any] = {}
    for customer, environment in itertools.product(customers, environments):
        names = StackNames(customer=customer, environment=environment)
        for name in (names.service_namespace, names.jobs_namespace, names.database):
            assert seen.setdefault(name, dataclasses.astuple(names)) == dataclasses.astuple(names), name


def test_each_stack_has_priority_classes_and_a_quota() -> None:
    for customer in CUSTOMERS:
        recording = preview_of(customer)
        priorities = {each.inputs["metadata"]["name"] for each in recording.of_type("PriorityClass")}
        assert priorities == {f"cloister-{customer}-prod-service", f"cloister-{customer}-prod-jobs"}
        (quota,) = [each for each in recording.of_type("ResourceQuota") if "-jobs-" in each.name]
        assert quota.inputs["spec"]["hard"]["requests.nvidia.com/gpu"] == "2"
