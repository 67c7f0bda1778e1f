"""Two customers on one cluster: the stacks of the documentation side by side, and one of them is destroyed."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.dev_stack import Deployment, dev_stack
from tests.cluster.nodes import add_node, wait_until_untainted
from tests.infra.previewed_stacks import ROOT

pytestmark = pytest.mark.cluster


@pytest.fixture
def customers(
    cluster: ControlPlane, api: KubernetesApi, programs: Path, tmp_path: Path
) -> Iterator[dict[str, Deployment]]:
    with ExitStack() as stack:
        made = {}
        for name in ("acme", "globex"):
            file = ROOT / "docs" / "stacks" / f"Pulumi.two-customers-{name}.yaml"
            (tmp_path / name).mkdir()
            made[name] = stack.enter_context(
                dev_stack(cluster, programs, tmp_path / name, file=file, is_waiting=True, keep_data=False)
            )
        pools = made["acme"].values["node_pools"]
        for node in [node for pool in pools.values() if isinstance(pool, dict) for node in pool["nodes"]]:
            if api.find("v1", "Node", node) is None:
                add_node(api, node, {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "1"})
                wait_until_untainted(api, node)
        yield made


def test_one_customer_is_deployed_and_destroyed_beside_an_unchanged_other(
    customers: dict[str, Deployment], api: KubernetesApi
) -> None:
    customers["acme"].up()
    customers["globex"].up()
    assert customers["acme"].planned(refresh=True) == {}
    customers["globex"].destroy()
    assert customers["acme"].planned(refresh=True) == {}
    assert [name for name in namespaces(api) if "globex" in name] == []
    customers["acme"].destroy()
    assert namespaces(api) == []


def namespaces(api: KubernetesApi) -> list[str]:
    names = (each["metadata"]["name"] for each in api.list("v1", "Namespace"))
    return [name for name in names if name.startswith("cloister-")]
