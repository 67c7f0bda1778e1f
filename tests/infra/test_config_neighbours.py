from pathlib import Path
from typing import Any

import pytest

from infra.stack_file.neighbours import neighbour_problems
from infra.stack_file.reading import ConfigError, parse_config, read_neighbours
from tests.infra.previewed_stacks import ROOT, changed, customer_text, stack_text

ACME, PLATFORM = "customer-acme", "platform"
OWN = "own-postgres-and-s3"


def found(values: dict[str, Any], other: str) -> set[str]:
    return {problem.partition(":")[0] for problem in neighbour_problems(values, {other: stack_text(other).values})}


def globex(**sections: Any) -> dict[str, Any]:
    """Return another customer of the same platform, with keys replaced."""
    return {**customer_text("globex").values, **sections}


def test_platform_and_customers_of_the_example_share_nothing() -> None:
    assert found(globex(), ACME) == set()
    assert found(globex(), PLATFORM) == set()
    assert found(changed(ACME), PLATFORM) == set()
    assert found(changed(PLATFORM), ACME) == set()


def test_customer_that_the_platform_of_its_cluster_lacks_is_refused() -> None:
    assert found(globex(customer="hooli"), PLATFORM) == {"customer"}


def test_stack_on_a_cluster_whose_kuberay_belongs_to_another_one_is_refused() -> None:
    context = {"context": stack_text("dev").values["kubernetes"]["context"]}
    assert found(globex(kubernetes=context), "dev") == {"layer"}
    alone = changed("dev", customer="globex", kuberay={"install": "none"}, node_pools={"manage_nodes": False})
    assert found(alone, "dev") == {"layer"}


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("customer", {"customer": "acme"}),
        ("api.ingress.host", {"api": {"ingress": {"host": "batch.acme.example"}}}),
        ("api.gateway.host", {"api": {"gateway": {"host": "batch.acme.example"}}}),
    ],
)
def test_what_another_stack_of_the_cluster_has_is_refused(key: str, sections: dict[str, Any]) -> None:
    assert found(globex(**sections), ACME) == {key}


@pytest.mark.parametrize(
    ("key", "sections"),
    [("kuberay.install", {}), ("node_pools.manage_nodes", {"kuberay": {"install": "none"}, "node_pools": {}})],
)
def test_what_a_cluster_has_once_is_not_created_twice(key: str, sections: dict[str, Any]) -> None:
    assert key in found(changed("dev", customer="hooli", **sections), "dev")


def test_stacks_must_not_share_prefix_key_database_or_role() -> None:
    copied = changed(OWN, customer="hooli", kuberay={"install": "none"}, node_pools={"manage_nodes": False})
    copied["api"] = {}
    copied["object_store"] = copied["object_store"] | {"prefix": "cloister/prod/hooli"}
    database = {"database.url", "database.service_role"}
    assert found(copied, OWN) == {"layer", "object_store.prefix", "object_store.access_key_id"} | database


def test_same_names_on_another_cluster_are_accepted() -> None:
    assert found(changed(ACME, kubernetes={"context": "elsewhere"}), ACME) == set()


def test_collision_is_reported_with_the_other_errors() -> None:
    values = globex(customer="acme", retention_days=0)
    with pytest.raises(ConfigError) as caught:
        parse_config(
            values,
            secret_keys=customer_text("globex").secret_keys,
            stack="customer-globex",
            neighbours={ACME: stack_text(ACME).values},
        )
    assert {problem.split(":")[1] for problem in caught.value.problems} == {"customer", "retention_days"}


def test_stack_itself_and_unreadable_files_are_no_neighbours(tmp_path: Path) -> None:
    assert set(read_neighbours(ROOT / "docs" / "stacks", stack=ACME)) >= {PLATFORM, OWN}
    assert ACME not in read_neighbours(ROOT / "docs" / "stacks", stack=ACME)
    (tmp_path / "Pulumi.broken.yaml").write_text("config: [")
    assert read_neighbours(tmp_path, stack="dev") == {}
