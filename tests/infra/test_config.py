from collections.abc import Mapping
from typing import Any

import pytest

from infra.config import ConfigError
from infra.config_schema import SECRET_KEYS
from tests.infra.previewed_stacks import STACKS, changed, parse, preview_values, stack_text


def problems(values: Mapping[str, Any], secret_keys: frozenset[str] | None = None) -> dict[str, str]:
    """What is wrong, by the key without the project."""
    with pytest.raises(ConfigError) as caught:
        parse(values, secret_keys)
    return dict(problem.removeprefix("cloister:").split(": ", 1) for problem in caught.value.problems)


def with_image(name: str, value: Any) -> dict[str, Any]:
    images = changed()["images"] | {name: value}
    return changed(images={key: image for key, image in images.items() if image is not None})


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_file_of_the_repository_is_right(name: str) -> None:
    text = stack_text(name)
    assert parse(text.values, text.secret_keys).names.customer == text.values["customer"]


def test_every_error_is_told_at_once_with_its_key() -> None:
    wrong = changed(
        customer="ACME Inc",
        enviroment="dev",
        database={"kind": "external", "url": "db.example", "job_rol": "x"},
        api={"replicas": 1},
        node_pools={"system": {"nodes": []}, "cpu": {"nodes": ["n"], "cpus": "8", "memory_gib": 28}},
        models=[{"id": "a"}],
        retention_days=0,
        environment=None,
        database_job_password=None,
    )
    assert set(problems(wrong)) >= {
        "customer",
        "enviroment",
        "environment",
        "database.url",
        "database.job_rol",
        "database.job_role",
        "database.networks",
        "api.replicas",
        "node_pools.system.nodes",
        "node_pools.cpu.cpus",
        "models[0].source",
        "retention_days",
        "database_job_password",
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
def test_an_unknown_key_is_told_with_the_nearest_one(section: str, typo: str, meant: str) -> None:
    values = changed(**{section: {typo: 3}}) if section else changed(**{typo: "x"})
    path = f"{section}.{typo}" if section else typo
    assert problems(values) == {path: f"there is no such key; did you mean '{meant}'?"}


def test_a_missing_section_is_told_with_what_it_is() -> None:
    assert "context" in problems(changed(kubernetes={}))["kubernetes.context"]
    assert "a section" in problems(changed(network=None))["network"]


def test_an_unknown_kind_is_told_with_those_there_are() -> None:
    told = problems(changed(database={"kind": "mysql"}))
    assert told == {"database.kind": "must be bundled, cloudnative_pg or external, not 'mysql'"}


@pytest.mark.parametrize(
    "image",
    ["registry.example/service:latest", "registry.example/service", "service@sha256:" + "1" * 64, "https://x/y"],
)
def test_an_image_without_a_digest_is_refused(image: str) -> None:
    assert set(problems(with_image("service", image))) == {"images.service"}


def test_a_secret_in_plain_text_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(database_owner_password="hunter2hunter2"), frozenset())
    assert "hunter2" not in str(caught.value)
    told = "".join(problem for problem in caught.value.problems if "owner" in problem)
    assert "pulumi config set --secret cloister:database_owner_password" in told


def test_a_missing_secret_is_told_with_the_command_that_sets_it() -> None:
    told = problems(changed(database_job_password=None))
    assert "pulumi config set --secret cloister:database_job_password" in told["database_job_password"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("database_owner_password", "two\nlines"),
        ("database_job_password", " "),
        ("object_store_secret_access_key", "with/slash+plus"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_and_not_repeated(name: str, value: str) -> None:
    told = problems(changed(**{name: value}))
    assert set(told) == {name}
    assert value.strip() == "" or value not in told[name]


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "input should be greater than or equal to 1, not 0"), ("5Gi", "input should be a valid integer, not '5Gi'")],
)
def test_the_workspace_has_a_size_in_whole_gib(value: Any, told: str) -> None:
    assert problems(changed(workspace_gib=value)) == {"workspace_gib": told}


def test_a_section_must_not_be_a_secret() -> None:
    secrets = stack_text().secret_keys | {"database"}
    assert "holds a secret" in problems(changed(database={"kind": "bundled"}), secrets)["database"]


def test_a_password_in_the_database_url_is_refused_and_not_repeated() -> None:
    own = stack_text("own-postgres-and-s3").values["database"] | {"url": "postgresql://a:hunter2@db.example/a"}
    told = problems(changed(database=own))
    assert "holds a password" in told["database.url"]
    assert "hunter2" not in str(told)


def test_secrets_do_not_show_in_the_configuration_itself() -> None:
    shown = repr(parse(changed(database_owner_password="hunter2hunter2")))
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("database.backup", {"database": {"kind": "cloudnative_pg", "backup": {}}}),
        ("database.recovery", {"database": {"kind": "cloudnative_pg", "recovery": {"from_server": "database"}}}),
        ("api.ingress.host", {"api": {"ingress": {"tls": {"cluster_issuer": "ca"}}}}),
        ("api.ingress.tls", {"api": {"ingress": {"host": "a.example", "tls": {}}}}),
        ("api.ingress.tls", {"api": {"ingress": {"host": "a.b", "tls": {"secret_name": "a", "cluster_issuer": "b"}}}}),
        ("api.max_replicas", {"api": {"replicas": 5}}),
        ("device_plugin.install", {"device_plugin": {"install": True}}),
        ("images.device_plugin", {"device_plugin": {"install": True}}),
        ("limits.job_gpus", {"limits": {"job_gpus": 1}}),
        ("limits.job_cpus", {"limits": {"job_cpus": 1000}}),
        ("network.kubernetes_api.networks[0]", {"network": {"kubernetes_api": {"networks": ["0.0.0.0/0"]}}}),
        ("kuberay.chart.version", {"kuberay": {"chart": {"version": "1.3.0"}}}),
        ("object_store_job_secret_access_key", {"object_store_job_secret_access_key": "x"}),
        ("registry_password", {"registry_password": "x"}),
        ("http_lane_api_key", {"http_lane_api_key": "x"}),
    ],
)
def test_values_that_contradict_each_other_are_refused(key: str, section: dict[str, Any]) -> None:
    secrets = stack_text().secret_keys | (section.keys() & SECRET_KEYS.keys())
    assert key in problems(changed(**section), secrets)


@pytest.mark.parametrize("limit", ["job_cpus", "job_memory_gib", "job_gpus"])
def test_a_limit_that_no_job_of_a_model_fits_below_is_refused(limit: str) -> None:
    values = dict(stack_text("v100-and-a10g").values)
    told = problems(values | {"limits": {limit: 1}})
    assert "takes with one engine" in told[f"limits.{limit}"]


def test_a_wrong_model_does_not_hide_what_another_one_needs() -> None:
    large = {"id": "large", "source": "/models/large", "accelerator": "v100", "weights_gib": 2}
    told = problems(changed(models=[{"id": "bad", "source": "/models/bad", "concurency": 1}, large]))
    assert {"models[0].concurency", "models[1].accelerator", "images.ray_v100"} <= told.keys()


@pytest.mark.parametrize("name", ["postgres", "versitygw", "kuberay_operator", "ray_cpu"])
def test_an_image_that_another_section_needs_is_required(name: str) -> None:
    assert "is required because" in problems(with_image(name, None))[f"images.{name}"]


def test_a_model_without_its_pool_or_image_is_refused() -> None:
    model = {"id": "m", "source": "/models/m", "accelerator": "v100", "weights_gib": 2}
    told = problems(changed(models=[model]))
    assert "node_pools.v100" in told["models[0].accelerator"]
    assert "images.ray_v100" in told


@pytest.mark.parametrize("engine_args", [{"dtype": "bfloat16"}, {"dtype": "float16", "quantization": "fp8"}, {}])
def test_a_v100_with_a_type_that_it_cannot_compute_in_is_refused(engine_args: dict[str, Any]) -> None:
    values = dict(stack_text("v100-and-a10g").values)
    values["models"] = [values["models"][0] | {"engine_args": engine_args}]
    assert any(key.startswith("models[0].engine_args") for key in problems(values))


def test_a_model_that_does_not_fit_its_gpus_is_refused() -> None:
    values = dict(stack_text("v100-and-a10g").values)
    values["models"] = [values["models"][1] | {"weights_gib": 40}]
    assert "models[0].weights_gib" in problems(values)


@pytest.mark.parametrize(("lane", "versions"), [("v100", {"ray": "2.60.0"}), ("a10g", {"vllm": "0.19.1"})])
def test_an_image_outside_its_lane_is_refused(lane: str, versions: dict[str, str]) -> None:
    values = dict(stack_text("v100-and-a10g").values)
    name = f"ray_{lane}"
    values["images"] = values["images"] | {name: values["images"][name] | versions}
    assert "this lane runs" in problems(values)[f"images.{name}"]


def test_a_node_belongs_to_one_pool() -> None:
    pools = {"system": {"nodes": ["n"]}, "cpu": {"nodes": ["n"], "cpus": 8, "memory_gib": 28}}
    assert "n is in node_pools.system too" in problems(changed(node_pools=pools))["node_pools.cpu.nodes"]


@pytest.mark.parametrize("pool", [{}, {"nodes": ["n"], "max_nodes": 2}])
def test_a_pool_has_either_nodes_or_a_most(pool: dict[str, Any]) -> None:
    pools = {**stack_text().values["node_pools"], "cpu": {**pool, "cpus": 8, "memory_gib": 28}}
    assert "must be there, or max_nodes, and not both" in problems(changed(node_pools=pools))["node_pools.cpu.nodes"]


def test_limits_count_the_most_nodes_that_an_autoscaler_makes() -> None:
    values = dict(stack_text("gpu-nodes-on-demand").values)
    assert parse(values | {"limits": {"job_gpus": 10}}).file.limits.job_gpus == 10
    assert "must be at most 10" in problems(values | {"limits": {"job_gpus": 11}})["limits.job_gpus"]


def test_an_own_database_needs_tls_and_two_roles() -> None:
    own = dict(stack_text("own-postgres-and-s3").values["database"])
    told = problems(changed(database=own | {"url": "postgresql://a@db.example:5432/a", "job_role": "a"}))
    assert set(told) == {"database.url", "database.job_role"}
    own.pop("ca_certificate")
    assert set(problems(changed(database=own))) == {"database.ca_certificate"}


def test_a_model_of_the_http_lane_needs_to_know_where_it_may_go() -> None:
    model = {"id": "m", "lane": "http", "base_url": "http://10.50.0.10:8000/v1"}
    assert set(problems(changed(models=[model]))) == {"network.endpoint_networks"}


def test_a_wrong_stack_file_asks_for_no_resource() -> None:
    values = changed(database={"kind": "mysql"})
    with pytest.raises(Exception, match=r"cloister:database\.kind: must be") as caught:
        preview_values(values, stack_text().secret_keys)
    assert type(caught.value).__name__ == "RunError"
