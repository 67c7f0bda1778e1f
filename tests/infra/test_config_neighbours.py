from pathlib import Path
from typing import Any

import pytest

from infra.stack_file.neighbours import neighbour_problems
from infra.stack_file.reading import ConfigError, parse_config, read_neighbours
from tests.infra.previewed_stacks import ROOT, changed, stack_text

ACME, GLOBEX = "two-customers-acme", "two-customers-globex"
OWN = "own-postgres-and-s3"


def found(values: dict[str, Any], other: str) -> set[str]:
    return {problem.partition(":")[0] for problem in neighbour_problems(values, {other: stack_text(other).values})}


def test_two_customers_of_the_example_share_nothing() -> None:
    assert found(changed(GLOBEX), ACME) == set()
    assert found(changed(ACME), GLOBEX) == set()


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("customer", {"customer": "acme"}),
        ("kuberay.install", {"kuberay": None}),
        ("node_pools.manage_nodes", {"node_pools": {"manage_nodes": True}}),
        ("api.ingress.host", {"api": {"ingress": {"host": "batch.acme.example"}}}),
    ],
)
def test_what_another_stack_of_the_cluster_has_is_refused(key: str, sections: dict[str, Any]) -> None:
    assert found(changed(GLOBEX, **sections), ACME) == {key}


def test_stacks_must_not_share_prefix_key_database_or_role() -> None:
    copied = changed(OWN, customer="hooli", kuberay={"install": "none"}, node_pools={"manage_nodes": False})
    copied["api"] = {}
    copied["object_store"] = copied["object_store"] | {"prefix": "cloister/prod/hooli"}
    database = {"database.url", "database.service_role"}
    assert found(copied, OWN) == {"object_store.prefix", "object_store.access_key_id"} | database


def test_same_names_on_another_cluster_are_accepted() -> None:
    assert found(changed(ACME, kubernetes={"context": "elsewhere"}), ACME) == set()


def test_collision_is_reported_with_the_other_errors() -> None:
    values = changed(GLOBEX, customer="acme", retention_days=0)
    with pytest.raises(ConfigError) as caught:
        parse_config(
            values,
            secret_keys=stack_text(GLOBEX).secret_keys,
            stack=GLOBEX,
            neighbours={ACME: stack_text(ACME).values},
        )
    assert {problem.split(":")[1] for problem in caught.value.problems} == {"customer", "retention_days"}


def test_stack_itself_and_unreadable_files_are_no_neighbours(tmp_path: Path) -> None:
    assert set(read_neighbours(ROOT / "docs" / "stacks", stack=ACME)) >= {GLOBEX, OWN}
    assert ACME not in read_neighbours(ROOT / "docs" / "stacks", stack=ACME)
    (tmp_path / "Pulumi.broken.yaml").write_text("config: [")
    assert read_neighbours(tmp_path, stack="dev") == {}
