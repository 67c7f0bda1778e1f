"""Pulumi's real engine with the project's program, by the Automation API with an inline program."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pulumi import automation

from infra.program import run
from infra.stack_file.sections import PROJECT

_PASSPHRASE: Final = "of no interest"
_REAL_PROVIDER: Final = "pulumi-resource-kubernetes"

logger = logging.getLogger(__name__)


def has_real_provider(path: str | None = None) -> bool:
    """Return whether the real Kubernetes provider is on PATH, and log which provider is used.

    Args:
        path: directories to search, in the format of PATH; None for PATH itself.
    """
    found = shutil.which(_REAL_PROVIDER, path=path)
    logger.info("Kubernetes provider: %s", found or f"the stand-in, because {_REAL_PROVIDER} is not on PATH")
    return found is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A workspace: a stack file, a state directory and the Pulumi CLI.

    Attributes:
        directory: directory of all files that it writes.
        programs: the directory with ``bin/pulumi``.
        provider_port: port of the stand-in provider; None for the real provider, which the engine finds on PATH.
    """

    directory: Path
    programs: Path
    provider_port: int | None

    @property
    def state_file(self) -> Path:
        """State file of the stack ``dev``."""
        return self.directory / "state" / ".pulumi" / "stacks" / PROJECT / "dev.json"

    def stack(self, values: Mapping[str, Any], secrets: Mapping[str, str]) -> automation.Stack:
        """Return the stack ``dev`` with this configuration instead of any earlier one.

        Args:
            values: keys of the stack file without the project prefix.
            secrets: secret keys of the stack file.
        """
        stack = automation.create_or_select_stack(
            stack_name="dev", project_name=PROJECT, program=run, opts=self._options()
        )
        path = self.directory / "work" / "Pulumi.dev.yaml"
        file = yaml.safe_load(path.read_text()) if path.exists() else {}
        file["config"] = {f"{PROJECT}:{key}": value for key, value in values.items()}
        path.write_text(yaml.safe_dump(file))
        for key, value in secrets.items():
            stack.set_config(f"{PROJECT}:{key}", automation.ConfigValue(value, secret=True))
        return stack

    def environment(self) -> dict[str, str]:
        """Environment variables for the CLI."""
        stand_in = {"PULUMI_DEBUG_PROVIDERS": f"kubernetes:{self.provider_port}"} if self.provider_port else {}
        return stand_in | {
            "PULUMI_CONFIG_PASSPHRASE": _PASSPHRASE,
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "true",
        }

    def _options(self) -> automation.LocalWorkspaceOptions:
        work, state = self.directory / "work", self.directory / "state"
        work.mkdir(exist_ok=True)
        state.mkdir(exist_ok=True)
        return automation.LocalWorkspaceOptions(
            work_dir=str(work),
            pulumi_home=str(self.directory / "home"),
            pulumi_command=automation.PulumiCommand(root=str(self.programs)),
            project_settings=automation.ProjectSettings(
                name=PROJECT, runtime="python", backend=automation.ProjectBackend(url=f"file://{state}")
            ),
            env_vars=self.environment(),
        )
