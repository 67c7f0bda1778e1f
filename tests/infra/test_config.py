from collections.abc import Mapping
from typing import Any

import pytest

from infra.stack_file.reading import ConfigError
from infra.stack_file.secret_keys import SECRET_KEYS
from tests.infra.previewed_stacks import STACKS, changed, parse, preview_values, stack_text

API_SERVER = {"kubernetes_api": {"networks": ["10.0.0.10/32", "fd00::10/128"]}}
INGRESS = {"host": "a.example", "controller": "traefik", "tls": {"secret_name": "a"}}
GATEWAY = {"host": "a.example", "gateway": "edge/public"}


def problems(values: Mapping[str, Any], secret_keys: frozenset[str] | None = None) -> dict[str, str]:
    """Parse a wrong stack file; return its problems by key without the project."""
    with pytest.raises(ConfigError) as caught:
        parse(values, secret_keys)
    return dict(problem.removeprefix("cloister:").split(": ", 1) for problem in caught.value.problems)


def with_image(name: str, value: Any) -> dict[str, Any]:
    images = changed()["images"] | {name: value}
    return changed(images={key: image for key, image in images.items() if image is not None})


def recovery_from(server: str, **keys: str) -> dict[str, Any]:
    return {"kind": "cloudnative_pg", "recovery": {"from_server": server, **keys}}


@pytest.mark.parametrize("name", STACKS)
def test_stack_files_of_the_repository_are_valid(name: str) -> None:
    text = stack_text(name)
    assert parse(text.values, text.secret_keys).names.customer == text.values.get("customer", "platform")


def test_all_errors_are_reported_with_their_keys() -> None:
    wrong = changed(
        customer="ACME Inc",
        enviroment="dev",
        database={"kind": "external", "url": "db.example", "job_rol": "x"},
        api={"replicas": 1},
        node_pools={"system": {"nodes": []}, "cpu": {"nodes": ["n"], "cpus": "8", "memory_gib": 28}},
        models=[{"id": "a"}],
        retention_days=0,
        usage_retention_days=30,
        prices={"l4": {"per_gpu_hour": 1, "currency": "USD"}, "cpu": {"per_gpu_hour": 1, "currency": "USD"}},
        environment=None,
        database_owner_password=None,
    )
    assert set(problems(wrong)) >= {
        "customer",
        "enviroment",
        "environment",
        "database.url",
        "database.job_rol",
        "database.networks",
        "api.replicas",
        "node_pools.system.nodes",
        "node_pools.cpu.cpus",
        "models[0].source",
        "retention_days",
        "usage_retention_days",
        "prices.cpu",
        "database_owner_password",
    }


@pytest.mark.parametrize(
    ("section", "typo", "meant"),
    [
        ("", "databse", "database"),
        ("", "database_owner_pasword", "database_owner_password"),
        ("api", "max_replica", "max_replicas"),
        ("limits", "max_running_job", "max_running_jobs"),
    ],
)
def test_unknown_key_is_reported_with_the_nearest_one(section: str, typo: str, meant: str) -> None:
    values = changed(**{section: {typo: 3}}) if section else changed(**{typo: "x"})
    path = f"{section}.{typo}" if section else typo
    assert problems(values) == {path: f"is not a known key; did you mean '{meant}'?"}


def test_missing_section_is_reported_with_its_meaning() -> None:
    assert "context" in problems(changed(kubernetes={}))["kubernetes.context"]
    assert "it is a section" in problems(changed(network=None))["network"]


def test_unknown_kind_is_reported_with_the_known_kinds() -> None:
    found = problems(changed(database={"kind": "mysql"}))
    assert found == {"database.kind": "must be bundled, cloudnative_pg, external or aws, not 'mysql'"}


@pytest.mark.parametrize(
    "image",
    ["registry.example/service:latest", "registry.example/service", "service@sha256:" + "1" * 64, "https://x/y"],
)
def test_image_without_a_digest_is_refused(image: str) -> None:
    assert set(problems(with_image("service", image))) == {"images.service"}


def test_secret_in_plain_text_is_refused_without_its_value() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(database_owner_password="hunter2hunter2"), frozenset())
    assert "hunter2" not in str(caught.value)
    found = "".join(problem for problem in caught.value.problems if "owner" in problem)
    assert "pulumi config set --secret cloister:database_owner_password" in found


def test_missing_secret_is_reported_with_the_command_that_sets_it() -> None:
    found = problems(changed(database_owner_password=None))
    assert "pulumi config set --secret cloister:database_owner_password" in found["database_owner_password"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("database_owner_password", "two\nlines"),
        ("database_owner_password", " "),
        ("object_store_secret_access_key", "with/slash+plus"),
        ("encryption_keys", "hunter2hunter2"),
        ("encryption_keys", ","),
        ("receipt_key", "5f" * 31),
    ],
)
def test_unusable_secret_is_refused_without_its_value(name: str, value: str) -> None:
    found = problems(changed(**{name: value}))
    assert set(found) == {name}
    assert value.strip() == "" or value not in found[name]


@pytest.mark.parametrize(
    ("value", "found"),
    [(0, "input should be greater than or equal to 1, not 0"), ("5Gi", "input should be a valid integer, not '5Gi'")],
)
def test_workspace_size_is_in_whole_gib(value: Any, found: str) -> None:
    assert problems(changed(workspace_gib=value)) == {"workspace_gib": found}


def test_section_must_not_be_a_secret() -> None:
    secrets = stack_text().secret_keys | {"database"}
    assert "is a secret" in problems(changed(database={"kind": "bundled"}), secrets)["database"]


def test_password_in_the_database_url_is_refused_without_its_value() -> None:
    own = stack_text("own-postgres-and-s3").values["database"] | {"url": "postgresql://a:hunter2@db.example/a"}
    found = problems(changed(database=own))
    assert "holds a password" in found["database.url"]
    assert "hunter2" not in str(found)


def test_repr_of_the_configuration_hides_secrets() -> None:
    shown = repr(parse(changed(database_owner_password="hunter2hunter2")))
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("database.recovery", {"database": {"kind": "cloudnative_pg", "recovery": {"from_server": "database"}}}),
        ("database.recovery.from_server", {"database": recovery_from("Database 1")}),
        ("database.recovery.from_server", {"database": recovery_from("d" * 41)}),
        ("database.recovery.until", {"database": recovery_from("database", until="2030-01-31 12:00")}),
        ("database.backup.schedule", {"database": {"kind": "cloudnative_pg", "backup": {"schedule": "0 3 * * *"}}}),
        ("api.ingress.host", {"api": {"ingress": {"tls": {"cluster_issuer": "ca"}}}}),
        ("api.ingress.tls", {"api": {"ingress": INGRESS | {"tls": {}}}}),
        ("api.ingress.tls", {"api": {"ingress": INGRESS | {"tls": {"secret_name": "a", "cluster_issuer": "b"}}}}),
        ("api.ingress.controller", {"api": {"ingress": {"host": "a.example", "tls": {"secret_name": "a"}}}}),
        ("api.ingress.class_name", {"api": {"ingress": INGRESS | {"controller": "custom"}}}),
        (
            "api.ingress.controller_namespace",
            {"api": {"ingress": INGRESS | {"controller": "custom", "class_name": "edge"}}},
        ),
        ("api.gateway.controller_namespace", {"api": {"gateway": GATEWAY}}),
        ("api.gateway.gateway", {"api": {"gateway": GATEWAY | {"gateway": "public"}}}),
        ("api.gateway", {"api": {"ingress": INGRESS, "gateway": GATEWAY | {"controller_namespace": "edge"}}}),
        ("api.max_replicas", {"api": {"replicas": 5}}),
        ("device_plugin.install", {"device_plugin": {"install": True}}),
        ("images.device_plugin", {"device_plugin": {"install": True}}),
        ("limits.job_gpus", {"limits": {"job_gpus": 1}}),
        ("limits.job_cpus", {"limits": {"job_cpus": 1000}}),
        ("network.kubernetes_api.networks[0]", {"network": {"kubernetes_api": {"networks": ["0.0.0.0/0"]}}}),
        ("network.kubernetes_api.networks[0]", {"network": {"kubernetes_api": {"networks": ["::/0"]}}}),
        ("network.kubernetes_api.networks", {"network": {}}),
        ("network.webhook_hosts", {"network": {"plugin": "calico", "webhook_hosts": ["hooks.acme.example"]}}),
        ("network.oidc_hosts", {"network": {"plugin": "calico", "oidc_hosts": ["login.acme.example"]}}),
        ("kuberay.chart.version", {"kuberay": {"chart": {"version": "1.5.9"}}}),
        ("kuberay.namespace", {"kuberay": {"namespace": "kube-system"}}),
        ("object_store_job_secret_access_key", {"object_store_job_secret_access_key": "x"}),
        ("registry_password", {"registry_password": "x"}),
        ("http_engine_api_key", {"http_engine_api_key": "x"}),
    ],
)
def test_contradicting_values_are_refused(key: str, section: dict[str, Any]) -> None:
    secrets = stack_text().secret_keys | (section.keys() & SECRET_KEYS.keys())
    assert key in problems(changed(**section), secrets)


@pytest.mark.parametrize(
    "sections",
    [
        {"network": API_SERVER},
        {"network": {"plugin": "cilium"}, "api": {"gateway": GATEWAY}},
        {"api": {"gateway": GATEWAY | {"controller_networks": ["10.0.0.0/24", "fd00::/64"]}}},
    ],
)
def test_networks_of_both_families_and_gateways_are_accepted(sections: dict[str, Any]) -> None:
    parse(changed(**sections))


BY_ADDRESS = {"webhook_networks": ["10.40.0.0/16"], "oidc_networks": ["10.60.0.10/32"]}
OWN_GATEWAY = {"gateway": {"host": "batch.acme.example", "gateway": "edge/public", "controller_namespace": "edge"}}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("k3s", {"network": {"plugin": "cilium"}}),
        ("k3s", {"network": {"plugin": "calico"}}),
        ("rke2-cilium", {"network": BY_ADDRESS | API_SERVER, "api": OWN_GATEWAY}),
        ("rke2-cilium", {"network": BY_ADDRESS | {"plugin": "calico"}, "api": OWN_GATEWAY}),
        ("v100-and-a10g", {"network": {"plugin": "cilium"}}),
        ("v100-and-a10g", {"network": {"plugin": "calico"}}),
    ],
)
def test_changes_of_the_deployment_guide_make_valid_stack_files(name: str, sections: dict[str, Any]) -> None:
    parse(changed(name, **sections), stack_text(name).secret_keys)


@pytest.mark.parametrize("limit", ["job_cpus", "job_memory_gib", "job_gpus"])
def test_limit_below_the_smallest_job_is_refused(limit: str) -> None:
    values = dict(stack_text("v100-and-a10g").values)
    found = problems(values | {"limits": {limit: 1}})
    assert "takes with one engine" in found[f"limits.{limit}"]


def test_limits_count_the_smallest_job_exactly() -> None:
    values = changed("v100-and-a10g")
    # Head, autoscaler and stages take 3.25 CPUs and 10.5 GiB; one of a node's four GPUs comes with 9.75 and 90.5.
    values["node_pools"]["v100"] |= {"cpus": 39, "memory_gib": 362}
    values["models"] = [values["models"][0] | {"weights_gib": 6, "tensor_parallel_size": 1}]
    exact = {"job_cpus": 13, "job_memory_gib": 101, "job_gpus": 1}
    assert parse(values | {"limits": exact}).file.limits.job_cpus == 13
    found = problems(values | {"limits": {name: least - 1 for name, least in exact.items() if least > 1}})
    assert "must be at least 13," in found["limits.job_cpus"]
    assert "must be at least 101," in found["limits.job_memory_gib"]


def test_limit_may_be_as_large_as_the_pools_together() -> None:
    values = changed("v100-and-a10g")
    most = {"job_cpus": 2 * 30 + 2 * 38 + 3 * 14, "job_memory_gib": 2 * 120 + 2 * 360 + 3 * 56, "job_gpus": 11}
    assert parse(values | {"limits": most}).file.limits.job_gpus == 11
    found = problems(values | {"limits": {name: limit + 1 for name, limit in most.items()}})
    assert found.keys() == {f"limits.{name}" for name in most}
    assert "must be at most 178," in found["limits.job_cpus"]


def test_largest_job_decides_about_a_limit() -> None:
    values = changed("v100-and-a10g")
    assert "a job of models[0] takes" in problems(values | {"limits": {"job_gpus": 3}})["limits.job_gpus"]
    values["models"].reverse()
    assert "a job of models[1] takes" in problems(values | {"limits": {"job_gpus": 3}})["limits.job_gpus"]


def test_old_chart_is_accepted_from_a_stack_that_does_not_install_it() -> None:
    values = changed(kuberay={"install": "none", "chart": {"version": "1.3.0"}})
    assert parse(values).file.kuberay.install == "none"


@pytest.mark.parametrize("version", ["1.6.0", "1.6.0-rc.1", "2.0.0"])
def test_chart_from_the_oldest_supported_version_is_accepted(version: str) -> None:
    assert parse(changed(kuberay={"chart": {"version": version}})).file.kuberay.chart.version == version


def test_recovery_needs_backups() -> None:
    values = changed("gpu-nodes-on-demand")
    recovery = {"recovery": {"from_server": "database"}}
    database = {name: value for name, value in values["database"].items() if name != "backup"} | recovery
    assert set(problems(values | {"database": database})) == {"database.recovery"}
    assert parse(values | {"database": database | {"backup": {}}}).names.customer


def test_model_in_an_image_may_be_in_any_directory() -> None:
    models = [changed()["models"][0] | {"source": "/opt/demo"}]
    assert parse(changed(models=models, model_weights={"kind": "image"})).catalogue["demo"]
    assert set(problems(changed(models=models))) == {"models[0].source"}


def test_wrong_weights_section_is_the_only_problem() -> None:
    models = [changed()["models"][0] | {"source": "/opt/demo"}]
    assert set(problems(changed(models=models, model_weights={"kind": "tape"}))) == {"model_weights.kind"}


def test_wrong_model_does_not_hide_what_another_one_needs() -> None:
    large = {"id": "large", "source": "/models/large", "accelerator": "v100", "weights_gib": 2}
    found = problems(changed(models=[{"id": "bad", "source": "/models/bad", "concurency": 1}, large]))
    assert {"models[0].concurency", "models[1].accelerator", "images.ray_v100"} <= found.keys()


@pytest.mark.parametrize("name", ["postgres", "versitygw", "kuberay_operator", "ray_cpu"])
def test_image_of_a_used_component_is_required(name: str) -> None:
    assert "is required because" in problems(with_image(name, None))[f"images.{name}"]


def test_model_without_its_pool_or_image_is_refused() -> None:
    model = {"id": "m", "source": "/models/m", "accelerator": "v100", "weights_gib": 2}
    found = problems(changed(models=[model]))
    assert "node_pools.v100" in found["models[0].accelerator"]
    assert "images.ray_v100" in found


@pytest.mark.parametrize("engine_args", [{"dtype": "bfloat16"}, {"dtype": "float16", "quantization": "fp8"}, {}])
def test_data_type_that_a_v100_lacks_is_refused(engine_args: dict[str, Any]) -> None:
    values = dict(stack_text("v100-and-a10g").values)
    values["models"] = [values["models"][0] | {"engine_args": engine_args}]
    assert any(key.startswith("models[0].engine_args") for key in problems(values))


def test_model_larger_than_its_gpus_is_refused() -> None:
    values = dict(stack_text("v100-and-a10g").values)
    values["models"] = [values["models"][1] | {"weights_gib": 40}]
    assert "models[0].weights_gib" in problems(values)


@pytest.mark.parametrize(("variant", "versions"), [("v100", {"ray": "2.60.0"}), ("cuda13", {"vllm": "0.19.1"})])
def test_image_outside_its_variants_range_is_refused(variant: str, versions: dict[str, str]) -> None:
    values = dict(stack_text("v100-and-a10g").values)
    name = f"ray_{variant}"
    values["images"] = values["images"] | {name: values["images"][name] | versions}
    assert "this variant runs" in problems(values)[f"images.{name}"]


def test_node_belongs_to_one_pool() -> None:
    pools = {"system": {"nodes": ["n"]}, "cpu": {"nodes": ["n"], "cpus": 8, "memory_gib": 28}}
    assert "n is in node_pools.system too" in problems(changed(node_pools=pools))["node_pools.cpu.nodes"]


@pytest.mark.parametrize("pool", [{}, {"nodes": ["n"], "max_nodes": 2}])
def test_pool_has_either_nodes_or_a_maximum(pool: dict[str, Any]) -> None:
    pools = {**stack_text().values["node_pools"], "cpu": {**pool, "cpus": 8, "memory_gib": 28}}
    assert "set either nodes or max_nodes" in problems(changed(node_pools=pools))["node_pools.cpu.nodes"]


def test_limits_count_the_most_nodes_of_an_autoscaler() -> None:
    values = dict(stack_text("gpu-nodes-on-demand").values)
    assert parse(values | {"limits": {"job_gpus": 10}}).file.limits.job_gpus == 10
    assert "must be at most 10" in problems(values | {"limits": {"job_gpus": 11}})["limits.job_gpus"]


def test_external_database_needs_tls() -> None:
    own = dict(stack_text("own-postgres-and-s3").values["database"])
    found = problems(changed(database=own | {"url": "postgresql://a@db.example:5432/a"}))
    assert set(found) == {"database.url"}
    own.pop("ca_certificate")
    assert set(problems(changed(database=own))) == {"database.ca_certificate"}


def test_service_must_not_log_in_as_the_owner_of_an_external_database() -> None:
    own = dict(stack_text("own-postgres-and-s3").values["database"])
    found = problems(changed(database=own | {"service_role": "cloister_initech_prod"}))
    assert set(found) == {"database.service_role"}


@pytest.mark.parametrize("key", ["database_service_password", "service_role"])
def test_role_of_an_external_database_and_its_password_belong_together(key: str) -> None:
    own, secrets = dict(stack_text("own-postgres-and-s3").values["database"]), stack_text().secret_keys
    own.pop(key, None)
    values = changed(database=own, **({key: None} if key in secrets else {}))
    assert set(problems(values, secrets - {key})) == {"database_service_password"}


def test_model_of_the_http_engine_needs_endpoint_networks() -> None:
    model = {"id": "m", "engine": "http", "base_url": "https://10.50.0.10:8000/v1"}
    assert set(problems(changed(models=[model]))) == {"network.endpoint_networks"}


OWN = "own-postgres-and-s3"
POSTGRES, S3 = (stack_text(OWN).values[name] for name in ("database", "object_store"))
CLEAR_URL = "postgresql://a@db.example:5432/a?sslmode="
HTTP_MODEL = {"id": "m", "engine": "http", "base_url": "http://10.50.0.10:8000/v1"}


@pytest.mark.parametrize(
    ("allowed", "key", "sections"),
    [
        ("database", "database.kind", {"database": {"kind": "bundled"}}),
        ("database", "database.url", {"database": POSTGRES | {"url": f"{CLEAR_URL}require"}}),
        ("database", "database.url", {"database": POSTGRES | {"url": f"{CLEAR_URL}verify-ca"}}),
        (
            "object_store",
            "object_store.kind",
            {"object_store": {"kind": "bundled"}, "object_store_job_secret_access_key": None},
        ),
        ("object_store", "object_store.endpoint_url", {"object_store": S3 | {"endpoint_url": "http://s3.example"}}),
        ("object_store", "object_store.endpoint_url", {"object_store": S3 | {"endpoint_url": "HTTP://s3.example"}}),
        ("kuberay_chart", "kuberay.chart.repository", {"kuberay": {"chart": {"repository": "http://charts.example"}}}),
        ("http_engine", "models[0].base_url", {"models": [HTTP_MODEL]}),
        ("tracing", "tracing.endpoint", {"tracing": {"endpoint": "http://otel.example", "networks": ["10.8.0.1/32"]}}),
    ],
)
def test_clear_text_is_refused_unless_the_stack_file_allows_it(
    allowed: str, key: str, sections: dict[str, Any]
) -> None:
    own, secrets = stack_text(OWN).values, stack_text(OWN).secret_keys
    sections |= {
        "images": stack_text().values["images"] | own["images"],
        "network": own["network"] | {"endpoint_networks": ["10.50.0.10/32"]},
        "durability": {"allow_single_copy": ["database", "object_store"]},
    }
    refused = problems(changed(OWN, **sections), secrets)
    assert set(refused) == {key}
    assert f"add {allowed} to transport.allow_clear_text" in refused[key]
    transport = {"allow_clear_text": [allowed]}
    parse(changed(OWN, transport=transport, **sections), secrets)


@pytest.mark.parametrize("name", ["database", "object_store"])
def test_bundled_data_service_is_refused_outside_of_development_unless_the_stack_file_allows_it(name: str) -> None:
    values = changed(environment="prod")
    both = ["database", "object_store"]
    refused = problems(values | {"durability": {"allow_single_copy": [each for each in both if each != name]}})
    assert set(refused) == {f"{name}.kind"}
    assert f"add {name} to durability.allow_single_copy" in refused[f"{name}.kind"]
    assert parse(values | {"durability": {"allow_single_copy": both}}).names.environment == "prod"


def test_clear_text_to_an_external_database_is_never_allowed() -> None:
    values = changed(OWN, transport={"allow_clear_text": ["database"]})
    values["database"] |= {"url": f"{CLEAR_URL}disable"}
    assert set(problems(values, stack_text(OWN).secret_keys)) == {"database.url"}


@pytest.mark.parametrize(
    "pem",
    ["text", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", "-----BEGIN PRIVATE KEY-----\nhunter2"],
)
def test_ca_bundle_must_be_certificates(pem: str) -> None:
    found = problems(changed(trust={"ca_bundle": pem}))
    assert set(found) == {"trust.ca_bundle"}
    assert "hunter2" not in found["trust.ca_bundle"]


@pytest.mark.parametrize("engine", ["direct", "processor", "serve"])
def test_model_of_another_engine_needs_no_endpoint_networks(engine: str) -> None:
    models = [changed()["models"][0] | {"engine": engine}]
    assert parse(changed(models=models)).catalogue["demo"].spec.engine == engine


def test_wrong_stack_file_requests_no_resource() -> None:
    values = changed(database={"kind": "mysql"})
    with pytest.raises(Exception, match=r"cloister:database\.kind: must be") as caught:
        preview_values(values, stack_text().secret_keys)
    assert type(caught.value).__name__ == "RunError"


def test_renamed_key_is_reported_with_its_new_name() -> None:
    image = stack_text("v100-and-a10g").values["images"]["ray_cuda13"]
    assert problems(with_image("ray_a10g", image)) == {"images.ray_a10g": "was renamed; use ray_cuda13"}


def test_wrong_key_of_a_gpu_pool_is_reported() -> None:
    pools = stack_text().values["node_pools"] | {"l40s": {"nodes": ["n"], "gpus_node": 1, "cpus": 8, "memory_gib": 28}}
    found = problems(changed(node_pools=pools))
    assert found["node_pools.l40s.gpus_node"] == "is not a known key; did you mean 'gpus_per_node'?"
    assert "GPUs" in found["node_pools.l40s.gpus_per_node"]


@pytest.mark.parametrize(("pool", "meant"), [("l40", "l40s"), ("manage_node", "manage_nodes")])
def test_unknown_pool_is_reported_with_the_nearest_key_or_accelerator(pool: str, meant: str) -> None:
    pools = stack_text().values["node_pools"] | {pool: True}
    assert problems(changed(node_pools=pools)) == {f"node_pools.{pool}": f"is not a known key; did you mean '{meant}'?"}


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("accelerators.rtx.memory_mib", {"rtx": {"compute_capability": "8.9"}}),
        ("accelerators.rtx.compute_capability", {"rtx": {"compute_capability": "6.1", "memory_mib": 1}}),
        ("accelerators.rtx.memory", {"rtx": {"compute_capability": 8.9, "memory_mib": 1, "memory": 1}}),
        ("accelerators.cpu", {"cpu": {"compute_capability": "8.9", "memory_mib": 1}}),
        ("accelerators.RTX 1", {"RTX 1": {"compute_capability": "8.9", "memory_mib": 1}}),
    ],
)
def test_wrong_accelerator_is_reported(key: str, row: dict[str, Any]) -> None:
    assert key in problems(changed(accelerators=row))


@pytest.mark.parametrize(
    ("name", "sections", "wrong"),
    [
        ("platform", {"models": [], "database": {"kind": "bundled"}}, {"models", "database"}),
        ("platform", {"customer": "acme", "isolation": "nodes"}, {"customer", "isolation"}),
        (
            "customer-acme",
            {"kuberay": {}, "device_plugin": {}, "customers": []},
            {"kuberay", "device_plugin", "customers"},
        ),
        (
            "customer-acme",
            {"platform": {}, "node_pools": {"manage_nodes": False}},
            {"platform", "node_pools.manage_nodes"},
        ),
        ("customer-acme", {"platform": {"stack": "a/b/c", "kuberay_namespace": "x"}}, {"platform"}),
        ("customer-acme", {"platform": None, "retention_days": 0}, {"platform", "retention_days"}),
        ("dev", {"isolation": "nodes", "customers": []}, {"isolation", "customers"}),
    ],
)
def test_keys_of_other_layers_are_refused_together(name: str, sections: dict[str, Any], wrong: set[str]) -> None:
    values = changed(name, **sections)
    found = problems(values, stack_text(name).secret_keys)
    assert found.keys() >= wrong
    for key in wrong & {"models", "kuberay", "customers"}:
        assert "does not belong to layer" in found[key]
        assert "remove it, or set layer to" in found[key]


def test_layer_names_the_layers() -> None:
    assert "customer" in problems(changed(layer="tenant"))["layer"]


def test_platform_needs_no_secret_and_refuses_those_of_a_customer() -> None:
    values = changed("platform", receipt_key="ab" * 32)
    assert set(problems(values, frozenset({"receipt_key"}))) == {"receipt_key"}


def test_customers_and_their_nodes_are_checked() -> None:
    acme = {"customer": "acme", "environment": "prod"}
    customers = [{**acme, "nodes": ["gpu-9"]}, acme, {**acme, "customer": "globex", "nodes": ["gpu-9"]}]
    found = problems(changed("platform", customers=customers), frozenset())
    assert found.keys() == {"customers[0].nodes", "customers[1]", "customers[2].nodes"}


def test_no_customer_is_called_like_the_owner_of_the_platform() -> None:
    assert "use another name" in problems(changed(customer="platform"))["customer"]
