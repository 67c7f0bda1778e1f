import runpy
import subprocess
import sys
from typing import Any

import pulumi
import pytest
import yaml
from pulumi.runtime import settings

from infra.naming import StackNames
from infra.program import run
from infra.recording import record
from tests.infra.previewed_stacks import ROOT, STACKS, changed, preview, preview_values, stack_text


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_file_previews_without_a_cluster(name: str) -> None:
    recording = preview(name)
    assert {deployment.name for deployment in recording.of_type("Deployment")} == {"api", "reconciler"}
    assert recording.messages == ()


@pytest.mark.parametrize("name", STACKS)
def test_every_resource_goes_to_the_cluster_that_the_stack_file_names(name: str) -> None:
    recording = preview(name)
    (provider,) = recording.of_type("pulumi:providers:kubernetes")
    assert provider.inputs["context"] == stack_text(name).values["kubernetes"]["context"]
    custom = [resource for resource in recording.resources if resource.custom and resource is not provider]
    assert {resource.provider.rpartition("::")[0] for resource in custom} == {provider.urn}


@pytest.mark.parametrize("name", STACKS)
def test_everything_in_a_namespace_waits_for_it(name: str) -> None:
    recording = preview(name)
    namespaces = {namespace.inputs["metadata"]["name"]: namespace.urn for namespace in recording.of_type("Namespace")}
    for resource in recording.resources:
        namespace = (resource.inputs.get("metadata") or {}).get("namespace")
        if resource.custom and namespace in namespaces:
            assert namespaces[namespace] in resource.dependencies, resource.name


def test_the_namespace_of_jobs_goes_before_the_operator_that_ends_the_jobs_in_it() -> None:
    recording = preview("dev")
    (namespace,) = [each for each in recording.of_type("Namespace") if each.name == "cloister-acme-dev-jobs"]
    (chart,) = recording.of_type("Chart")
    assert chart.urn in namespace.dependencies


def test_a_rollout_waits_for_the_migrations_and_they_for_the_database() -> None:
    recording = preview("dev")
    (migrations,) = [job for job in recording.of_type("batch/v1:Job") if job.name == "migrations"]
    (database,) = [each for each in recording.of_type("StatefulSet") if each.name == "database"]
    assert database.urn in migrations.dependencies
    assert all(migrations.urn in deployment.dependencies for deployment in recording.of_type("Deployment"))


@pytest.mark.parametrize("name", STACKS)
def test_no_secret_shows_in_the_state_or_in_what_pods_are_told(name: str) -> None:
    recording = preview(name)
    shown = "shown-in-place-of-a-secret"
    for resource in recording.resources:
        hidden = {str(path) for path in resource.secrets}
        assert shown not in str(_without(resource.inputs, resource.secrets)), (resource.name, hidden)
    assert recording.secret_outputs == frozenset()
    assert shown not in str(recording.outputs)


def _without(value: Any, hidden: frozenset[tuple[str | int, ...]], path: tuple[str | int, ...] = ()) -> Any:
    if path in hidden:
        return None
    if isinstance(value, dict):
        return {key: _without(item, hidden, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, hidden, (*path, index)) for index, item in enumerate(value)]
    return value


def test_the_outputs_tell_where_the_api_is_and_what_to_run_next() -> None:
    outputs = preview("v100-and-a10g").outputs
    assert outputs["api_address"] == "https://batch.acme.example/v1"
    assert outputs["first_key"] == (
        "kubectl --context factory --namespace cloister-acme-prod exec deploy/api -- cloister keys create first"
    )
    assert outputs["doctor"] == "cloister doctor --context factory --namespace cloister-acme-prod"
    assert outputs["models"] == ["qwen2.5-32b", "llama-3.1-8b"]
    assert preview("dev").outputs["api_address"] == "http://api.cloister-acme-dev.svc:80/v1"


def test_what_a_destroy_leaves_is_what_the_outputs_say() -> None:
    recording = preview("v100-and-a10g")
    (said,) = recording.outputs["stays_after_destroy"]
    kept = {resource.name for resource in recording.resources if resource.retain_on_delete}
    assert kept == {resource.name for resource in recording.resources if resource.protect}
    assert said.startswith("namespace cloister-acme-prod with the volumes of the database and the object store")
    assert "cloister-acme-prod" in kept
    assert "cloister-acme-prod-jobs" not in kept


def test_of_a_customers_own_stores_a_destroy_leaves_all() -> None:
    _, database, objects = preview("own-postgres-and-s3").outputs["stays_after_destroy"]
    assert "postgres.initech.example" in database
    assert objects == "the objects in s3://initech-llm-batch/cloister/prod"


def test_a_stack_without_keep_data_leaves_nothing() -> None:
    recording = preview_values(changed(keep_data=False), stack_text().secret_keys)
    assert [each.name for each in recording.resources if each.protect or each.retain_on_delete] == []
    assert recording.outputs["stays_after_destroy"] == []


def test_a_pull_secret_and_a_mirror_reach_every_pod() -> None:
    for resource in preview("air-gap").resources:
        pod = ((resource.inputs.get("spec") or {}).get("template") or {}).get("spec")
        if resource.custom and isinstance(pod, dict):
            assert pod["imagePullSecrets"] == [{"name": "image-pull"}], resource.name
            images = [container["image"] for container in pod["containers"]]
            assert all(image.startswith("registry.umbra.example/mirror/") for image in images), resource.name


def test_the_cli_runs_the_program_from_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(ROOT))])
    # An empty stack file: the program has come as far as its own message.
    with pytest.raises(pulumi.RunError, match="customer: is required"):
        record(lambda: runpy.run_path(str(ROOT / "infra"), run_name="__main__") and None)


def test_the_automation_api_runs_the_program_without_a_directory() -> None:
    def inline() -> None:
        settings.SETTINGS.root_directory = None
        run()

    with pytest.raises(pulumi.RunError, match="customer: is required"):
        record(inline)


def test_no_module_of_infra_hides_one_of_pythons_own() -> None:
    # The CLI puts the directory first on the path.
    names = {path.stem for path in (ROOT / "infra").glob("*.py")} | {path.name for path in (ROOT / "infra").iterdir()}
    assert names & set(sys.stdlib_module_names) == set()


def test_an_import_does_nothing() -> None:
    code = "import infra.program, infra.__main__, infra.config_reference, infra.network_drawing"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_project_file_names_what_is_there() -> None:
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
def test_a_name_that_could_be_read_in_two_ways_is_refused(customer: str, environment: str) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        StackNames(customer=customer, environment=environment)
