"""A stack that keeps its data: what a destroy refuses, what it leaves, and what finds it again."""

from pathlib import Path

import pytest
from pulumi import automation

from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import JOBS, SERVICE
from tests.cluster.dev_stack import dev_stack

pytestmark = [
    pytest.mark.cluster,
    # Pulumi's Automation API leaves the event loop of a program that failed for the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
VOLUMES = {"database-data", "object-store-data"}


def test_volumes_outlive_a_destroy_and_the_stack_that_is_made_again_has_them(
    cluster: ControlPlane, api: KubernetesApi, programs: Path, tmp_path: Path
) -> None:
    with dev_stack(cluster, programs, tmp_path, keep_data=True) as deployment:
        deployment.stack.up()
        before = volumes(api)
        with pytest.raises(automation.CommandError, match="protected"):
            deployment.stack.destroy()
        deployment.unprotect()
        deployment.stack.destroy()
        assert api.find("v1", "Namespace", JOBS) is None
        assert {each["metadata"]["name"] for each in api.list("apps/v1", "StatefulSet", SERVICE)} == set()
        assert volumes(api) == before
        assert set(before) == VOLUMES
        deployment.stack.up()
        assert volumes(api) == before
        deployment.values |= {"keep_data": False}
        deployment.stack.up()
        deployment.stack.destroy()
        assert api.find("v1", "Namespace", SERVICE) is None


def volumes(api: KubernetesApi) -> dict[str, str]:
    claims = api.list("v1", "PersistentVolumeClaim", SERVICE)
    return {claim["metadata"]["name"]: claim["metadata"]["uid"] for claim in claims}
