import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from infra.rendering.recording import Recording
from ray_job.contract.rayjobs import template_key
from service.adapters.rayjob_templates import load_templates
from service.cli.app import app
from service.model_catalogue import parse_catalogue
from service.settings import read_settings
from tests.infra.previewed_stacks import (
    STACKS_OF_CUSTOMERS,
    STACKS_WITH_PASSWORDS,
    changed,
    preview,
    preview_values,
    stack_text,
)


def pod(recording: Recording, name: str) -> dict[str, Any]:
    (found,) = [
        each for kind in ("Deployment", "batch/v1:Job") for each in recording.of_type(kind) if each.name == name
    ]
    template: dict[str, Any] = found.inputs["spec"]["template"]
    return template


def environment(recording: Recording, name: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod(recording, name)["spec"]["containers"][0]["env"]}


def previewed(**sections: Any) -> Recording:
    return preview_values(changed(**sections), stack_text().secret_keys)


@pytest.mark.parametrize("name", STACKS_OF_CUSTOMERS)
def test_two_replicas_run_and_one_may_be_evicted(name: str) -> None:
    recording = preview(name)
    replicas = {each.name: each.inputs["spec"]["replicas"] for each in recording.of_type("Deployment")}
    assert replicas["api"] >= 2
    assert (replicas["reconciler"], replicas["coordinator"]) == (2, 1)
    budgets = {each.name: each.inputs["spec"]["maxUnavailable"] for each in recording.of_type("PodDisruptionBudget")}
    assert budgets == {"api": 1, "coordinator": 1, "reconciler": 1}


def test_autoscaler_sets_the_number_of_api_pods() -> None:
    recording = preview("v100-and-a10g")
    (autoscaler,) = recording.of_type("HorizontalPodAutoscaler")
    assert (autoscaler.inputs["spec"]["minReplicas"], autoscaler.inputs["spec"]["maxReplicas"]) == (2, 6)
    (api,) = [each for each in recording.of_type("Deployment") if each.name == "api"]
    assert api.ignore_changes == ("spec.replicas",)


@pytest.mark.parametrize("name", ["api", "reconciler", "coordinator"])
def test_probes_use_the_endpoints_of_the_service(name: str) -> None:
    container = pod(preview(), name)["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}


@pytest.mark.parametrize("name", STACKS_WITH_PASSWORDS)
def test_environment_has_the_settings_and_no_password(name: str) -> None:
    variables = environment(preview(name), "reconciler")
    assert variables["CLOISTER_LAUNCHER"] == "kuberay"
    assert variables["CLOISTER_KUBERNETES_NAMESPACE"].endswith("-jobs")
    assert variables["PGPASSFILE"] == "/run/cloister/credentials/pgpass"
    assert variables["CLOISTER_OBJECT_STORE"].startswith("s3://")
    assert ":" not in variables["CLOISTER_DATABASE_URL"].partition("://")[2].partition("@")[0]


@pytest.mark.parametrize("name", STACKS_WITH_PASSWORDS)
def test_migrations_alone_log_in_as_the_owner_of_the_database(name: str) -> None:
    recording = preview(name)
    owner, service = ("database-credentials", "database-service-credentials")
    for component in ("api", "reconciler", "coordinator"):
        mounted = str(pod(recording, component)["spec"]["volumes"])
        assert (owner in mounted, service in mounted) == (False, True)
    assert "database-service-credentials" not in str(pod(recording, "migrations"))
    variables = environment(recording, "migrations")
    role = urlsplit(environment(recording, "api")["CLOISTER_DATABASE_URL"]).username
    assert variables["CLOISTER_DATABASE_SERVICE_ROLE"] == role
    assert urlsplit(variables["CLOISTER_DATABASE_URL"]).username != role
    (login,) = [each for each in recording.of_type("Secret") if each.inputs["metadata"]["name"] == service]
    assert f":{role}:" in login.inputs["stringData"]["pgpass"]


def test_customer_can_give_one_role_only() -> None:
    values, secrets = stack_text("own-postgres-and-s3").values, stack_text("own-postgres-and-s3").secret_keys
    database = {key: value for key, value in values["database"].items() if key != "service_role"}
    without = {key: value for key, value in values.items() if key != "database_service_password"}
    recording = preview_values(without | {"database": database}, secrets - {"database_service_password"})
    urls = {environment(recording, name)["CLOISTER_DATABASE_URL"] for name in ("api", "migrations")}
    assert len(urls) == 1
    assert "CLOISTER_DATABASE_SERVICE_ROLE" not in environment(recording, "migrations")


def test_jobs_reach_the_coordinator_at_its_service() -> None:
    recording = preview()
    url = urlsplit(environment(recording, "reconciler")["CLOISTER_COORDINATOR_URL"])
    (service,) = [each for each in recording.of_type("Service") if each.name == "coordinator"]
    metadata, spec = service.inputs["metadata"], service.inputs["spec"]
    assert url.hostname == f"{metadata['name']}.{metadata['namespace']}.svc"
    assert [url.port] == [port["port"] for port in spec["ports"]]
    template = pod(recording, "coordinator")
    assert spec["selector"].items() <= template["metadata"]["labels"].items()
    port, metrics = template["spec"]["containers"][0]["ports"]
    assert metrics["name"] == "metrics"  # which its Service does not have
    assert (port["name"], str(port["containerPort"])) == (
        spec["ports"][0]["targetPort"],
        environment(recording, "coordinator")["CLOISTER_COORDINATOR_PORT"],
    )


@pytest.mark.parametrize(
    ("name", "secrets"),
    [
        ("api", {"database-service-credentials", "object-store-credentials", "encryption-keys", "receipt-key"}),
        ("reconciler", {"database-service-credentials", "object-store-credentials", "encryption-keys", "receipt-key"}),
        ("coordinator", {"database-service-credentials", "object-store-credentials"}),
        ("migrations", {"database-credentials", "encryption-keys"}),
    ],
)
def test_pod_has_the_secrets_that_it_uses(name: str, secrets: set[str]) -> None:
    spec = pod(preview(), name)["spec"]
    assert {each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each} == secrets
    assert ("CLOISTER_ENCRYPTION_KEYS_FILE" in environment(preview(), name)) == ("encryption-keys" in secrets)
    assert ("CLOISTER_RECEIPT_KEY_FILE" in environment(preview(), name)) == ("receipt-key" in secrets)


def test_coordinator_runs_the_coordinator() -> None:
    assert pod(preview(), "coordinator")["spec"]["containers"][0]["command"] == ["python", "-m", "service.coordinator"]


@pytest.mark.parametrize("name", STACKS_OF_CUSTOMERS)
def test_config_maps_have_the_catalogue_and_a_template_of_each_model(name: str) -> None:
    maps = {each.name: each.inputs.get("data", {}) for each in preview(name).of_type("ConfigMap")}
    catalogue = parse_catalogue(yaml.safe_load(maps["models"]["models.yaml"]))
    assert list(catalogue) == [model["id"] for model in stack_text(name).values["models"]]
    assert set(maps["ray-job-templates"]) == {template_key(model) for model in catalogue}
    assert all(json.loads(text)["kind"] == "RayJob" for text in maps["ray-job-templates"].values())


def test_service_reads_the_prices_and_the_retention_of_usage() -> None:
    prices = {"a10g": {"per_gpu_hour": 1.006, "currency": "USD"}}
    recording = previewed(prices=prices, usage_retention_days=400)
    (models,) = [each.inputs["data"] for each in recording.of_type("ConfigMap") if each.name == "models"]
    assert yaml.safe_load(models["models.yaml"])["prices"] == prices
    assert environment(recording, "reconciler")["CLOISTER_USAGE_RETENTION_DAYS"] == "400"


@pytest.mark.parametrize("name", STACKS_OF_CUSTOMERS)
def test_service_accepts_the_rendered_settings_and_templates(name: str, tmp_path: Path) -> None:
    recording = preview(name)
    maps = {each.name: each.inputs.get("data", {}) for each in recording.of_type("ConfigMap")}
    for file, text in maps["ray-job-templates"].items():
        (tmp_path / file).write_text(text)
    settings = read_settings(environment(recording, "reconciler") | {"CLOISTER_RAY_JOB_TEMPLATES": str(tmp_path)})
    assert (settings.host, settings.health_port, settings.launcher) == ("::", 8001, "kuberay")
    catalogue = parse_catalogue(yaml.safe_load(maps["models"]["models.yaml"]))
    templates = load_templates(tmp_path, catalogue, namespace=settings.kubernetes_namespace)
    assert set(templates) == set(catalogue)
    assert read_settings(environment(recording, "api")).port == 8000


def annotations(recording: Recording, name: str) -> tuple[str, str]:
    found: dict[str, str] = pod(recording, name)["metadata"]["annotations"]
    return found["cloister.dev/configuration"], found["cloister.dev/credentials"]


def test_change_of_models_or_secrets_rolls_the_pods() -> None:
    models = [stack_text().values["models"][0] | {"batch_size": 32}]
    configuration, credentials = annotations(preview(), "api")
    with_models = annotations(previewed(models=models), "api")
    assert with_models[0] != configuration
    assert with_models[1] == credentials
    with_password = annotations(previewed(database_service_password="another"), "reconciler")
    assert with_password[0] == configuration
    assert with_password[1] != credentials


def test_new_image_creates_a_new_migrations_job() -> None:
    images = stack_text().values["images"]
    image = images["service"].replace("1" * 64, "9" * 64)
    jobs = [
        each.inputs["metadata"]["name"]
        for recording in (preview(), previewed(images=images | {"service": image}))
        for each in recording.of_type("batch/v1:Job")
        if each.name == "migrations"
    ]
    assert jobs == ["migrations-111111111111", "migrations-999999999999"]


def test_migrations_have_the_login_of_the_database_only() -> None:
    spec = pod(preview(), "migrations")["spec"]
    assert spec["containers"][0]["command"] == ["python", "-m", "service.db"]
    assert "object-store-credentials" not in str(spec["volumes"])


def test_only_servers_that_delete_have_the_key_that_signs_receipts() -> None:
    recording = preview()
    for name, has_key in (("api", True), ("reconciler", True), ("coordinator", False), ("migrations", False)):
        assert ("receipt-key" in str(pod(recording, name)["spec"]["volumes"])) is has_key
        assert ("CLOISTER_RECEIPT_KEY_FILE" in environment(recording, name)) is has_key


@pytest.mark.parametrize("name", ["api", "reconciler"])
def test_volume_for_temporary_files_has_the_size_of_the_workspace(name: str) -> None:
    for recording, gib in ((preview(), 5), (previewed(workspace_gib=40), 40)):
        spec = pod(recording, name)["spec"]
        (tmp,) = [each for each in spec["volumes"] if each["name"] == "tmp"]
        assert tmp["emptyDir"] == {"sizeLimit": f"{gib}Gi"}
        assert environment(recording, name)["TMPDIR"] == spec["containers"][0]["volumeMounts"][0]["mountPath"]
        resources = spec["containers"][0]["resources"]
        assert resources["limits"]["ephemeral-storage"] == resources["requests"]["ephemeral-storage"] == f"{gib + 1}Gi"


@pytest.mark.parametrize("name", ["api", "reconciler"])
def test_api_and_reconciler_get_the_size_of_their_workspace(name: str) -> None:
    assert environment(previewed(workspace_gib=40), name)["CLOISTER_WORKSPACE_GIB"] == "40"


def test_api_trusts_the_proxies_of_the_stack_file_only() -> None:
    recording = previewed(api={"trusted_proxies": ["10.0.5.0/24", "fd12::/64"]})
    assert [str(proxy) for proxy in read_settings(environment(recording, "api")).trusted_proxies] == [
        "10.0.5.0/24",
        "fd12::/64",
    ]
    assert read_settings(environment(previewed(), "api")).trusted_proxies == ()


def test_issuer_of_tokens_reaches_the_api_only() -> None:
    oidc = {
        "issuer": "https://login.acme.example",
        "audience": "cloister",
        "jwks_url": "https://login.acme.example/certs",
        "grants": [{"group": "ml", "project": "research", "scopes": ["read"]}],
    }
    recording = previewed(oidc=oidc)
    read = read_settings(environment(recording, "api")).oidc
    assert read is not None
    assert read.model_dump(exclude_defaults=True, mode="json") == oidc
    assert not [name for name in ("reconciler", "coordinator") if "CLOISTER_OIDC" in environment(recording, name)]


def test_collector_of_traces_is_known_to_the_servers_and_to_no_pod_of_a_job() -> None:
    tracing = {"endpoint": "https://otel.acme.example:4318", "networks": ["10.80.0.10/32"], "sampled_segments": 0.5}
    recording = previewed(tracing=tracing)
    for name in ("api", "reconciler", "coordinator"):
        variables = environment(recording, name)
        assert (variables["CLOISTER_OTLP_ENDPOINT"], variables["CLOISTER_TRACE_SEGMENTS"]) == (
            tracing["endpoint"],
            "0.5",
        )
        assert "CLOISTER_OTLP_ENDPOINT" not in environment(previewed(), name)
    knowing = [each.name for each in recording.resources if "otel.acme.example" in json.dumps(each.inputs, default=str)]
    assert sorted(knowing) == ["api", "coordinator", "reconciler"]
    [port] = {
        json.dumps(rule["ports"])
        for each in recording.of_type("NetworkPolicy")
        for rule in each.inputs["spec"].get("egress", ())
        if {"ipBlock": {"cidr": "10.80.0.10/32"}} in rule["to"]
    }
    assert json.loads(port) == [{"port": 4318, "protocol": "TCP"}]


def test_audit_log_is_exported_by_a_pod_with_the_login_of_the_service_only() -> None:
    recording = previewed(audit_export={"syslog_host": "syslog.acme.example", "networks": ["10.70.0.10/32"]})
    (job,) = recording.of_type("CronJob")
    spec = job.inputs["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    _, *arguments = container["command"]
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0
    assert arguments[-2:] == ["--syslog-tls", "syslog.acme.example:6514"]
    mounted = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
    assert mounted == {"database-service-credentials"}
    assert spec["serviceAccountName"] in {each.name for each in recording.of_type("ServiceAccount")}
    assert not previewed().of_type("CronJob")


def test_ingress_uses_tls_on_api_paths_only() -> None:
    (ingress,) = preview("v100-and-a10g").of_type("Ingress")
    spec = ingress.inputs["spec"]
    assert spec["tls"] == [{"hosts": ["batch.acme.example"], "secretName": "api-tls"}]
    assert [path["path"] for path in spec["rules"][0]["http"]["paths"]] == ["/v1"]
    assert ingress.inputs["metadata"]["annotations"]["cert-manager.io/cluster-issuer"] == "acme-ca"


@pytest.mark.parametrize(
    ("controller", "class_name", "annotations"),
    [
        ("traefik", "traefik", {"traefik.ingress.kubernetes.io/router.entrypoints": "websecure"}),
        ("haproxy", "haproxy", {"haproxy.org/timeout-server": "1h"}),
        ("contour", "contour", {"projectcontour.io/response-timeout": "1h"}),
        (
            "nginx",
            "nginx",
            {
                "nginx.ingress.kubernetes.io/proxy-body-size": "210m",
                "nginx.ingress.kubernetes.io/proxy-read-timeout": "3600",
            },
        ),
    ],
)
def test_controller_determines_class_and_annotations(
    controller: str, class_name: str, annotations: dict[str, str]
) -> None:
    section = {"host": "a.example", "controller": controller, "tls": {"secret_name": "a"}}
    (ingress,) = previewed(api={"ingress": section}).of_type("Ingress")
    assert ingress.inputs["spec"]["ingressClassName"] == class_name
    assert annotations.items() <= ingress.inputs["metadata"]["annotations"].items()


def test_own_class_and_annotations_replace_those_of_the_controller() -> None:
    name = "haproxy.org/timeout-server"
    section = {"host": "a.example", "controller": "haproxy", "class_name": "edge", "annotations": {name: "2h"}}
    (ingress,) = previewed(api={"ingress": section | {"tls": {"secret_name": "a"}}}).of_type("Ingress")
    assert ingress.inputs["spec"]["ingressClassName"] == "edge"
    assert ingress.inputs["metadata"]["annotations"][name] == "2h"


def test_gateway_routes_api_paths_of_its_tls_listener_without_a_short_timeout() -> None:
    recording = preview("rke2-cilium")
    (route,) = recording.of_type("HTTPRoute")
    spec = route.inputs["spec"]
    (gateway,) = spec["parentRefs"]
    assert (gateway["namespace"], gateway["name"], gateway["sectionName"]) == ("edge", "public", "https")
    assert spec["hostnames"] == ["batch.acme.example"]
    (rule,) = spec["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "1h", "backendRequest": "1h"}
    assert recording.outputs["api_address"] == "https://batch.acme.example/v1"


@pytest.mark.parametrize("name", STACKS_OF_CUSTOMERS)
def test_services_have_addresses_of_both_families_where_the_cluster_has_them(name: str) -> None:
    services = preview(name).of_type("core/v1:Service")
    assert {service.inputs["spec"]["ipFamilyPolicy"] for service in services} == {"PreferDualStack"}


def test_database_at_an_ipv6_address_has_a_valid_url() -> None:
    text = stack_text("own-postgres-and-s3")
    address = "postgresql://owner@[fd00::5]:5432/cloister?sslmode=verify-full"
    database = text.values["database"] | {"url": address, "networks": ["fd00::5/128"]}
    recording = preview_values(changed("own-postgres-and-s3", database=database), text.secret_keys)
    assert "@[fd00::5]:5432/" in environment(recording, "api")["CLOISTER_DATABASE_URL"]


def test_stack_without_ingress_section_has_no_ingress() -> None:
    assert not preview("dev").of_type("Ingress")


def test_ca_certificate_of_an_external_database_reaches_the_service_only() -> None:
    recording = preview("own-postgres-and-s3")
    maps = [each for each in recording.of_type("ConfigMap") if each.inputs["metadata"]["name"] == "database-ca"]
    assert [each.inputs["metadata"]["namespace"] for each in maps] == ["cloister-initech-prod"]
    assert "database-ca" in str(pod(recording, "api")["spec"]["volumes"])
    assert "sslrootcert" in environment(recording, "api")["CLOISTER_DATABASE_URL"]


def test_api_key_of_the_http_engine_reaches_its_workers_only() -> None:
    model = {"id": "m", "engine": "http", "base_url": "https://10.50.0.10:8000/v1"}
    network = stack_text().values["network"] | {"endpoint_networks": ["10.50.0.10/32"]}
    values = changed(models=[model], network=network, http_engine_api_key="endpoint-key")
    recording = preview_values(values, stack_text().secret_keys | {"http_engine_api_key"})
    (secret,) = [each for each in recording.of_type("Secret") if "endpoint-key" in str(each.inputs)]
    assert secret.inputs["metadata"]["namespace"] == "cloister-acme-dev-jobs"
    (templates,) = [each for each in recording.of_type("ConfigMap") if each.name == "ray-job-templates"]
    assert f'"secretName":"{secret.inputs["metadata"]["name"]}"' in "".join(templates.inputs["data"].values())


def secrets_of_jobs(recording: Recording) -> dict[str, dict[str, str]]:
    return {
        each.inputs["metadata"]["name"]: each.inputs["stringData"]
        for each in recording.of_type("Secret")
        if each.inputs["metadata"]["namespace"].endswith("-jobs")
    }


def test_jobs_have_no_login_but_the_key_that_copies_weights() -> None:
    copied, mounted = (
        secrets_of_jobs(previewed(model_weights=section))
        for section in ({"kind": "object_store"}, {"kind": "volume", "claim": "model-weights"})
    )
    assert (list(copied), list(mounted)) == (["weights-credentials"], [])
    assert "aws_access_key_id = cloister-acme-dev-jobs" in copied["weights-credentials"]["aws"]
