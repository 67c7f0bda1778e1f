"""Generate the rules file and the dashboards: ``python -m infra.rendering.monitoring_files [--check]``.

They are for a Prometheus and a Grafana without operators; a stack creates its own objects from the same source.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from infra.monitoring.alerts import rule_groups
from infra.monitoring.dashboards import dashboards
from infra.rendering.generated_page import write_or_check

DIRECTORY: Final = Path(__file__).parents[1] / "monitoring"
MODULE: Final = "infra.rendering.monitoring_files"


def files() -> Mapping[Path, str]:
    """Return the text of each file by its path."""
    rules = yaml.safe_dump(rule_groups(), sort_keys=False, width=120, allow_unicode=True)
    return {
        DIRECTORY / "alerts.yaml": f"# `python -m {MODULE}` generates this file.\n{rules}",
        **{DIRECTORY / name: f"{json.dumps(each, indent=2)}\n" for name, each in dashboards().items()},
    }


if __name__ == "__main__":
    sys.exit(max(write_or_check(path, text, sys.argv[1:], module=MODULE) for path, text in files().items()))
