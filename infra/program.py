"""The program of a stack, as the Pulumi CLI and the Automation API run it."""

import pulumi

from infra.config import ConfigError, read_config
from infra.stack import deploy


def run() -> None:
    """Reads the stack file, makes the resources, and exports what the stack tells.

    Raises:
        pulumi.RunError: the stack file is wrong; no resource has been asked for.
    """
    try:
        config = read_config()
    except ConfigError as error:
        # A RunError is shown without a traceback.
        raise pulumi.RunError(str(error)) from error
    for name, value in deploy(config).as_dict().items():
        pulumi.export(name, value)
