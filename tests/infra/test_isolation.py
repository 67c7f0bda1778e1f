"""Stacks that share a cluster, a Postgres server and a bucket are isolated from each other."""

import dataclasses
import itertools
from typing import Any

import pytest

from infra.kubernetes.naming import StackNames
from infra.rendering.recording import RecordedResource, Recording
from tests.infra.previewed_stacks import preview, preview_values, stack_text

FIRST, SECOND = "two-customers-acme", "two-customers-globex"


def identity(resource: RecordedResource) -> tuple[str, str, str]:
    metadata = resource.inputs.get("metadata") or {}
    return resource.type, metadata.get("namespace", ""), metadata.get("name", resource.name)


def objects(recording: Recording) -> dict[tuple[str, str, str], RecordedResource]:
    return {
        identity(resource): resource
        for resource in recording.resources
        if resource.custom and not resource.type.startswith("pulumi:")
    }


def test_stacks_of_one_cluster_have_no_common_resource() -> None:
    assert objects(preview(FIRST)).keys() & objects(preview(SECOND)).keys() == set()


def test_stacks_of_one_cluster_share_no_secret() -> None:
    text = stack_text(SECOND)
    secrets = {key: f"other-{key}".replace("_", "-") for key in text.secret_keys}
    secrets |= {"encryption_keys": f"{'k' * 43}=", "receipt_key": "ab" * 32}
    ours = {leaf for each in preview(FIRST).of_type("Secret") for leaf in each.inputs["stringData"].values()}
    theirs = preview_values({**text.values, **secrets}, text.secret_keys).of_type("Secret")
    assert theirs
    assert not ours & {leaf for each in theirs for leaf in each.inputs["stringData"].values()}


@pytest.mark.parametrize("names", [(FIRST, SECOND), (SECOND, FIRST)])
def test_resources_do_not_refer_to_the_other_stack(names: tuple[str, str]) -> None:
    mine, other = (str(stack_text(name).values["customer"]) for name in names)
    for resource in preview(names[0]).resources:
        assert f"cloister-{other}" not in str(resource.inputs), (mine, resource.name)


def test_cluster_scoped_names_contain_the_stack() -> None:
    platform = ("core/v1:Node", "NodePatch", "helm.sh", "device-plugin", "kuberay")
    for kind, namespace, name in objects(preview(SECOND)):
        if not namespace and not any(part in kind for part in platform):
            assert name.startswith("cloister-globex-prod"), (kind, name)


def test_only_one_stack_deploys_the_platform() -> None:
    kinds = [{resource.type.rpartition(":")[2] for resource in preview(name).resources} for name in (FIRST, SECOND)]
    assert {"NodePatch", "Chart"} <= kinds[0]
    assert not {"NodePatch", "Chart", "DaemonSet"} & kinds[1]


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
    for name, customer in ((FIRST, "acme"), (SECOND, "globex")):
        recording = preview(name)
        priorities = {each.inputs["metadata"]["name"] for each in recording.of_type("PriorityClass")}
        assert priorities == {f"cloister-{customer}-prod-service", f"cloister-{customer}-prod-jobs"}
        (quota,) = [each for each in recording.of_type("ResourceQuota") if "-jobs-" in each.name]
        assert quota.inputs["spec"]["hard"]["requests.nvidia.com/gpu"] == "2"
