"""A stack on the cluster, deployed by Pulumi's engine through the real Kubernetes provider or its stand-in."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from pulumi import automation

from infra.stack_file.reading import read_stack_file
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import DEV
from tests.cluster.engine import Engine, has_real_provider
from tests.cluster.nodes import pods_become_ready
from tests.cluster.provider import StandInProvider, stand_in_provider

SECRETS: Final = {
    "database_owner_password": "1f2e3d4c5b6a79880000000000000000",
    "encryption_keys": f"{'k' * 43}=",
    "database_service_password": "2f2e3d4c5b6a79880000000000000000",
    "object_store_secret_access_key": "3f2e3d4c5b6a79880000000000000000",
    "receipt_key": "5f" * 32,
}


class Deployment:
    """A stack on the cluster.

    Attributes:
        engine: workspace of the stack.
        values: keys of the stack file. Change them before the next `up`.
        secrets: secret keys of the stack file.
    """

    def __init__(
        self, engine: Engine, provider: StandInProvider | None, values: dict[str, Any], secrets: dict[str, str]
    ) -> None:
        self.engine = engine
        self._provider = provider
        self.values = values
        self.secrets = secrets

    @property
    def warnings(self) -> list[str]:
        """Warnings of the API server; always empty with the real provider, which prints them only."""
        return self._provider.warnings if self._provider else []

    @property
    def stack(self) -> automation.Stack:
        return self.engine.stack(self.values, self.secrets)

    @contextmanager
    def changed(self, **sections: Any) -> Iterator[None]:
        """Change keys of the stack file inside the context."""
        before = dict(self.values)
        self.values |= sections
        try:
            yield
        finally:
            self.values.clear()
            self.values |= before

    def up(self, *, refresh: bool = False) -> None:
        """Run `pulumi up`.

        Raises:
            automation.CommandError: the preview or a resource failed.
        """
        with failed_programs_collected():
            self.stack.up(refresh=refresh)

    def destroy(self) -> None:
        """Run `pulumi destroy`.

        Raises:
            automation.CommandError: a resource is protected or could not be deleted.
        """
        with failed_programs_collected():
            self.stack.destroy()

    def planned(self, *, refresh: bool = False) -> dict[str, int]:
        """Number of steps of a preview by Pulumi's name of the operation, without unchanged resources."""
        with failed_programs_collected():
            summary = self.stack.preview(refresh=refresh).change_summary
        return {str(getattr(kind, "value", kind)): count for kind, count in summary.items() if "same" not in str(kind)}

    def urn(self, name: str) -> str:
        """Return the URN of a resource.

        Args:
            name: logical name, with the end of the type and ``::`` before it if several resources have the name.
        """
        resources = self.stack.export_stack().deployment["resources"]
        return str(next(each["urn"] for each in resources if each["urn"].endswith((f"::{name}", f":{name}"))))

    def unprotect(self, name: str = "") -> None:
        """Run `pulumi state unprotect`, which the Automation API lacks.

        Args:
            name: logical name of the resource; empty for all resources.
        """
        stack, chosen = self.stack, self.urn(name) if name else "--all"
        command = [str(self.engine.programs / "bin" / "pulumi"), "state", "unprotect", chosen, "--yes"]
        environment = {**stack.workspace.env_vars, "PULUMI_HOME": str(self.engine.directory / "home")}
        subprocess.run([*command, "--stack", "dev"], cwd=stack.workspace.work_dir, env=environment, check=True)


@contextmanager
def failed_programs_collected() -> Iterator[None]:
    """Collect the event loop of a failed program before pytest reports the failure.

    Otherwise it is collected while pytest parses source files, and CPython 3.11 fails in `ast.parse`.
    """
    try:
        yield
    except automation.CommandError:
        collect_failed_programs()
        raise


def collect_failed_programs() -> None:
    """Collect the event loops that the Automation API leaves behind, without their warnings, which fail tests."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


@contextmanager
def dev_stack(
    cluster: ControlPlane,
    programs: Path,
    directory: Path,
    *,
    file: Path = DEV,
    is_waiting: bool = False,
    **sections: Any,
) -> Iterator[Deployment]:
    """Return the stack before its first `up`; the caller deploys and destroys it.

    Args:
        cluster: cluster of the stack. Without kubelets, pods are reported as ready where the provider waits for them.
        programs: the directory with ``bin/pulumi``.
        directory: directory for workspace and state.
        file: the stack file.
        is_waiting: `up` waits for pods also without kubelets, as it always does with the real provider.
        **sections: keys of the stack file to replace.
    """
    text = read_stack_file(file)
    values = {key: value for key, value in text.values.items() if key not in text.secret_keys}
    values |= {
        "kubernetes": {"kubeconfig": str(cluster.kubeconfig), "context": "admin"},
        # The stand-in cannot install charts, and the definitions exist.
        **({"kuberay": {"install": "none"}} if text.values.get("layer") != "customer" else {}),
        **sections,
    }
    values["images"] = {key: image for key, image in values["images"].items() if key != "kuberay_operator"}
    secrets = {key: SECRETS.get(key, f"{key}-0123456789") for key in text.secret_keys}
    is_real = has_real_provider()
    with ExitStack() as stack:
        # By now the threads of failed programs have ended.
        stack.callback(collect_failed_programs)
        if not cluster.has_kubelets and (is_real or is_waiting):
            stack.enter_context(pods_become_ready(stack.enter_context(KubernetesApi(cluster.kubeconfig))))
        provider, port = None, None
        if not is_real:
            provider, port = stack.enter_context(stand_in_provider(is_waiting=cluster.has_kubelets or is_waiting))
        yield Deployment(Engine(directory=directory, programs=programs, provider_port=port), provider, values, secrets)
