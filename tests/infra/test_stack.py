import runpy
import subprocess
import sys
from typing import Any

import pulumi
import pytest
import yaml
from pulumi.runtime import settings

from infra.kubernetes.naming import StackNames
from infra.program import run
from infra.rendering.recording import RecordedResource, record
from tests.infra.previewed_stacks import (
    PLATFORM_STACK,
    ROOT,
    STACKS,
    STACKS_OF_CUSTOMERS,
    changed,
    preview,
    preview_values,
    stack_text,
)


@pytest.mark.parametrize("name", STACKS)
def test_stack_file_previews_without_a_cluster(name: str) -> None:
    recording = preview(name)
    service = set() if name == PLATFORM_STACK else {"api", "coordinator", "reconciler"}
    assert {deployment.name for deployment in recording.of_type("Deployment")} == service
    assert recording.messages == ()


@pytest.mark.parametrize("name", STACKS)
def test_all_resources_use_the_cluster_of_the_stack_file(name: str) -> None:
    recording = preview(name)
    providers = recording.of_type("pulumi:providers:kubernetes")
    context = stack_text(name).values["kubernetes"]["context"]
    assert {provider.inputs["context"] for provider in providers} == {context}
    # A resource that changes its provider is replaced if the providers' cluster identifiers differ.
    assert {provider.inputs["clusterIdentifier"] for provider in providers} == {context}
    objects = [resource for resource in recording.resources if resource.type.startswith("kubernetes:")]
    assert {resource.provider.rpartition("::")[0] for resource in objects if resource.custom} <= {
        provider.urn for provider in providers
    }


@pytest.mark.parametrize("keep_data", [True, False])
@pytest.mark.parametrize("name", STACKS_OF_CUSTOMERS)
def test_only_objects_that_hold_data_are_adopted_if_they_exist(name: str, keep_data: bool) -> None:
    recording = preview_values(changed(name, keep_data=keep_data), stack_text(name).secret_keys)
    adopting = {
        provider.urn
        for provider in recording.of_type("pulumi:providers:kubernetes")
        if provider.inputs.get("upsertExistingObjects") in {True, "true"}
    }
    adopted = {each.name for each in recording.resources if each.provider.rpartition("::")[0] in adopting}
    holders = {each.name for each in recording.resources if holds_data(each)}
    assert adopted == holders
    assert {each.name for each in recording.resources if each.protect} == (holders if keep_data else set())


def holds_data(resource: RecordedResource) -> bool:
    labels = (resource.inputs.get("metadata") or {}).get("labels") or {}
    is_service_namespace = (
        resource.type.endswith(":Namespace")
        and labels["app.kubernetes.io/component"] == "namespaces"
        and not resource.name.endswith("-jobs")
    )
    return is_service_namespace or resource.inputs.get("kind") in {"PersistentVolumeClaim", "Cluster"}


@pytest.mark.parametrize("keep_data", [True, False])
@pytest.mark.parametrize("name", STACKS_OF_CUSTOMERS)
def test_volume_claim_is_never_deleted_to_replace_it(name: str, keep_data: bool) -> None:
    recording = preview_values(changed(name, keep_data=keep_data), stack_text(name).secret_keys)
    for claim in recording.of_type("PersistentVolumeClaim"):
        assert claim.retain_on_delete
        # None would leave the order to the provider, which deletes first.
        assert claim.delete_before_replace is False


@pytest.mark.parametrize("name", STACKS)
def test_resources_depend_on_their_namespace(name: str) -> None:
    recording = preview(name)
    namespaces = {namespace.inputs["metadata"]["name"]: namespace.urn for namespace in recording.of_type("Namespace")}
    for resource in recording.resources:
        namespace = (resource.inputs.get("metadata") or {}).get("namespace")
        if resource.custom and namespace in namespaces:
            assert namespaces[namespace] in resource.dependencies, resource.name


def test_rayjobs_end_before_the_operator_loses_its_rights_in_their_namespace() -> None:
    recording = preview("dev")
    (namespace,) = [each for each in recording.of_type("Namespace") if each.name == "cloister-acme-dev-jobs"]
    (chart,), owner = recording.of_type("Chart"), recording.named("jobs")
    assert namespace.urn in chart.dependencies
    assert chart.urn in owner.dependencies
    # Kubernetes returns after the RayJobs have gone.
    assert owner.inputs["metadata"]["annotations"] == {"pulumi.com/deletionPropagationPolicy": "foreground"}


def test_rollout_depends_on_migrations_and_these_on_the_database() -> None:
    recording = preview("dev")
    (migrations,) = [job for job in recording.of_type("batch/v1:Job") if job.name == "migrations"]
    (database,) = [each for each in recording.of_type("StatefulSet") if each.name == "database"]
    assert database.urn in migrations.dependencies
    assert all(migrations.urn in deployment.dependencies for deployment in recording.of_type("Deployment"))


@pytest.mark.parametrize("name", STACKS)
def test_secrets_are_secret_in_the_state_and_absent_elsewhere(name: str) -> None:
    recording = preview(name)
    shown = "shown-in-place-of-a-secret"
    for resource in recording.resources:
        hidden = {str(path) for path in resource.secrets}
        assert shown not in str(_without(resource.inputs, resource.secrets)), (resource.name, hidden)
    of_new_clusters = {("kubeconfig",)} if "hosts" in stack_text(name).values else set()
    assert recording.secret_outputs == of_new_clusters
    assert shown not in str(recording.outputs)


def _without(value: Any, hidden: frozenset[tuple[str | int, ...]], path: tuple[str | int, ...] = ()) -> Any:
    if path in hidden:
        return None
    if isinstance(value, dict):
        return {key: _without(item, hidden, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, hidden, (*path, index)) for index, item in enumerate(value)]
    return value


def test_outputs_have_the_api_address_and_the_next_commands() -> None:
    outputs = preview("v100-and-a10g").outputs
    assert outputs["api_address"] == "https://batch.acme.example/v1"
    assert outputs["first_key"] == (
        "kubectl --context factory --namespace cloister-acme-prod exec deploy/api -- cloister keys create first"
    )
    assert outputs["doctor"] == "cloister doctor --context factory --namespace cloister-acme-prod"
    assert outputs["models"] == ["qwen2.5-32b", "llama-3.1-8b"]
    assert preview("dev").outputs["api_address"] == "http://api.cloister-acme-dev.svc:80/v1"


def test_outputs_list_what_a_destroy_keeps() -> None:
    recording = preview("v100-and-a10g")
    (stays,) = recording.outputs["stays_after_destroy"]
    kept = {resource.name for resource in recording.resources if resource.retain_on_delete}
    assert kept == {resource.name for resource in recording.resources if resource.protect}
    assert stays.startswith("namespace cloister-acme-prod with the volumes of the database and the object store")
    assert "cloister-acme-prod" in kept
    assert "cloister-acme-prod-jobs" not in kept


def test_destroy_keeps_the_data_in_the_customers_own_stores() -> None:
    _, database, objects = preview("own-postgres-and-s3").outputs["stays_after_destroy"]
    assert "postgres.initech.example" in database
    assert objects == "the objects in s3://initech-llm-batch/cloister/prod"


def test_destroy_without_keep_data_keeps_nothing() -> None:
    recording = preview_values(changed(keep_data=False), stack_text().secret_keys)
    assert [each.name for each in recording.resources if each.protect] == []
    # Claims go with their namespace.
    retained = [each for each in recording.resources if each.retain_on_delete]
    deleted_namespaces = {each.name for each in recording.of_type("Namespace")} - {each.name for each in retained}
    assert {each.inputs["metadata"]["namespace"] for each in retained} <= deleted_namespaces
    assert recording.outputs["stays_after_destroy"] == []


def test_pull_secret_and_mirror_apply_to_every_pod() -> None:
    for resource in preview("air-gap").resources:
        pod = ((resource.inputs.get("spec") or {}).get("template") or {}).get("spec")
        if resource.custom and isinstance(pod, dict):
            assert pod["imagePullSecrets"] == [{"name": "image-pull"}], resource.name
            images = [container["image"] for container in pod["containers"]]
            assert all(image.startswith("registry.umbra.example/mirror/") for image in images), resource.name


def test_cli_runs_the_program_from_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(ROOT))])
    # The stack file is empty, so the program ends with its own message.
    with pytest.raises(pulumi.RunError, match="customer: is required"):
        record(lambda: runpy.run_path(str(ROOT / "infra"), run_name="__main__") and None)


def test_automation_api_runs_the_program_without_a_directory() -> None:
    def inline() -> None:
        settings.SETTINGS.root_directory = None
        run()

    with pytest.raises(pulumi.RunError, match="customer: is required"):
        record(inline)


def test_modules_of_infra_do_not_shadow_the_standard_library() -> None:
    # The CLI puts the directory first on the module path.
    names = {path.stem for path in (ROOT / "infra").glob("*.py")} | {path.name for path in (ROOT / "infra").iterdir()}
    assert names & set(sys.stdlib_module_names) == set()


def test_import_has_no_side_effects() -> None:
    code = "import infra.program, infra.__main__, infra.rendering.configuration_page, infra.rendering.network_drawing"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_project_file_matches_the_repository() -> None:
    project = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
    assert project["name"] == "cloister"
    assert (ROOT / project["main"] / "__main__.py").exists()
    requirements = (ROOT / project["main"] / "requirements.txt").read_text().splitlines()
    (constraint,) = [line.split()[1] for line in requirements if line.startswith("--constraint")]
    pinned = (ROOT / project["main"] / constraint).read_text().lower()
    packages = [line for line in requirements if line and not line.startswith(("#", "--"))]
    assert all(f"\n{package.lower()}==" in pinned for package in packages)


@pytest.mark.parametrize(
    ("customer", "environment"),
    [("a-b", "c-d"), ("a--b", "dev"), ("a-", "dev"), ("1a", "dev"), ("A", "dev"), ("a" * 21, "dev"), ("a", "jobs")],
)
def test_ambiguous_name_is_rejected(customer: str, environment: str) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        StackNames(customer=customer, environment=environment)
