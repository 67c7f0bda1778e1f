"""Pulumi's real engine on the project's own program, by the Automation API with an inline program."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pulumi import automation

from infra.config_schema import PROJECT
from infra.program import run

_PASSPHRASE: Final = "of no interest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A workspace: a stack file, a state in a directory, and the CLI.

    Attributes:
        directory: of all that it writes.
        programs: the directory with ``bin/pulumi``.
        provider_port: of the stand-in provider. The real one would wait for pods, which never run here.
    """

    directory: Path
    programs: Path
    provider_port: int

    @property
    def state_file(self) -> Path:
        """Where the state of the stack ``dev`` is."""
        return self.directory / "state" / ".pulumi" / "stacks" / PROJECT / "dev.json"

    def stack(self, values: Mapping[str, Any], secrets: Mapping[str, str]) -> automation.Stack:
        """The stack ``dev`` with this configuration, whatever it had before.

        Args:
            values: the keys of the stack file without the project.
            secrets: the secret ones.
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
            env_vars={
                "PULUMI_CONFIG_PASSPHRASE": _PASSPHRASE,
                "PULUMI_SKIP_UPDATE_CHECK": "true",
                "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
                "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "true",
                "PULUMI_DEBUG_PROVIDERS": f"kubernetes:{self.provider_port}",
            },
        )
