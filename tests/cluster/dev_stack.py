"""A stack on the cluster by Pulumi's engine, through the real Kubernetes provider or the stand-in for it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pulumi import automation

from infra.stack_file import read_stack_file
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import DEV
from tests.cluster.engine import Engine, has_real_provider
from tests.cluster.provider import StandInProvider, stand_in_provider

SECRETS: Final = {
    "database_owner_password": "1f2e3d4c5b6a79880000000000000000",
    "database_job_password": "2f2e3d4c5b6a79880000000000000000",
    "object_store_secret_access_key": "3f2e3d4c5b6a79880000000000000000",
}


class Deployment:
    """A stack on the cluster.

    Attributes:
        engine: the workspace.
        values: the stack file's keys; change them before the next `up`.
        secrets: the secret ones.
    """

    def __init__(
        self, engine: Engine, provider: StandInProvider | None, values: dict[str, Any], secrets: dict[str, str]
    ) -> None:
        self.engine = engine
        self._provider = provider
        self.values = values
        self.secrets = secrets

    @property
    def provider(self) -> StandInProvider:
        """The stand-in between engine and API server, where there is one."""
        assert self._provider is not None, "the real provider is in use, which tells nothing here"
        return self._provider

    @property
    def stack(self) -> automation.Stack:
        return self.engine.stack(self.values, self.secrets)

    def planned(self, *, refresh: bool = False) -> dict[str, int]:
        """What a preview would do besides leaving things as they are, by Pulumi's word and how often."""
        summary = self.stack.preview(refresh=refresh).change_summary
        return {str(getattr(kind, "value", kind)): count for kind, count in summary.items() if "same" not in str(kind)}

    def unprotect(self) -> None:
        """`pulumi state unprotect --all`, which the Automation API does not have."""
        stack = self.stack
        command = [str(self.engine.programs / "bin" / "pulumi"), "state", "unprotect", "--all", "--yes"]
        environment = {**stack.workspace.env_vars, "PULUMI_HOME": str(self.engine.directory / "home")}
        subprocess.run([*command, "--stack", "dev"], cwd=stack.workspace.work_dir, env=environment, check=True)


@contextmanager
def dev_stack(
    cluster: ControlPlane,
    programs: Path,
    directory: Path,
    *,
    file: Path = DEV,
    **sections: Any,
) -> Iterator[Deployment]:
    """The stack, not made yet; whoever makes it destroys it.

    Args:
        cluster: where it goes. Without kubelets the real provider would wait for ever.
        programs: the directory with ``bin/pulumi``.
        directory: for workspace and state.
        file: the stack file.
        **sections: keys of it that are different here.
    """
    text = read_stack_file(file)
    values = {key: value for key, value in text.values.items() if key not in text.secret_keys}
    values |= {
        "kubernetes": {"kubeconfig": str(cluster.kubeconfig), "context": "admin"},
        # Charts are Helm's; the definitions are there.
        "kuberay": {"install": "none"},
        **sections,
    }
    values["images"] = {key: image for key, image in values["images"].items() if key != "kuberay_operator"}
    secrets = {key: SECRETS.get(key, f"{key}-0123456789") for key in text.secret_keys}
    if cluster.has_kubelets and has_real_provider():
        engine = Engine(directory=directory, programs=programs, provider_port=None)
        yield Deployment(engine, None, values, secrets)
        return
    with stand_in_provider(is_waiting=cluster.has_kubelets) as (provider, port):
        engine = Engine(directory=directory, programs=programs, provider_port=port)
        yield Deployment(engine, provider, values, secrets)
