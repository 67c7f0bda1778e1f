"""``python -m tests.conformance --base-url … --api-key … --model …``; ``--help`` tells all options.

Exit status: 0 if all that was checked holds, 1 if not, 2 if it could not be checked.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from tests.conformance.collector import PLUGIN_NAME, Collector
from tests.conformance.report import to_json, to_markdown, to_table
from tests.conformance.target import Target, UnusableTargetError, check_usable

_HERE: Final = Path(__file__).parent
_PYTEST_BROKE: Final = (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; base URL and key may stand in the environment, where the clients have them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Checks a server against OpenAI's Files and Batches contract, from outside.",
    )
    add = parser.add_argument
    add("--base-url", default=os.environ.get("OPENAI_BASE_URL"), help="with /v1 at its end; or OPENAI_BASE_URL")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="or OPENAI_API_KEY, which no process list shows")
    add("--model", help="a model that answers /v1/chat/completions")
    add("--completions-model", help="one that answers /v1/completions; default: the same")
    add("--embeddings-model", help="one that answers /v1/embeddings; default: the same")
    add("--other-api-key", default="", help="a key of another project, to try whether it sees anything")
    add("--timeout", type=float, default=900, metavar="S", help="seconds to wait for the end of a batch (900)")
    add("--large", action="store_true", help="also upload a file that is over the limit of 200 MB")
    add("--extensions", action="store_true", help="also check what cloister promises beyond the contract")
    add("--json", type=Path, metavar="FILE", help="write all results as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write all results as Markdown")
    add("-k", metavar="EXPRESSION", help="only the checks that pytest's -k selects")
    add("--list", action="store_true", help="list the checks and make none; needs no server")
    given = parser.parse_args(arguments)
    missing = [name for name in ("base_url", "api_key", "model") if not getattr(given, name)]
    if missing and not given.list:
        parser.error(f"missing: {', '.join('--' + name.replace('_', '-') for name in missing)}")
    return given


def target_of(given: argparse.Namespace) -> Target:
    """The server that the options name."""
    return Target(
        base_url=(given.base_url or "").rstrip("/"),
        api_key=given.api_key or "",
        model=given.model or "",
        completions_model=given.completions_model or given.model or "",
        embeddings_model=given.embeddings_model or given.model or "",
        timeout_s=given.timeout,
        large=given.large,
        other_api_key=given.other_api_key,
    )


def run(collector: Collector, *more: str) -> int:
    """Makes all checks; gives pytest's exit status. What pytest prints is shown only if pytest itself broke."""
    arguments = [str(_HERE), f"--config-file={_HERE / 'pytest.ini'}", "--quiet", *more]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main(arguments, plugins=[_Named(collector)])
    if status in _PYTEST_BROKE:
        sys.stderr.write(printed.getvalue())
    return int(status)


class _Named:
    """Registers the collector under a name by which the conftest finds it."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._collector, PLUGIN_NAME)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks a server, prints the table and returns the exit status."""
    given = options(arguments)
    target = target_of(given)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    collector = Collector(target, extensions=given.extensions, console=console)
    if given.list:
        status = run(collector, "--collect-only")
        for area, point, text in collector.listed:
            print(area, point, text, sep="\t")  # noqa: T201 - the result
        return 2 if status in _PYTEST_BROKE else 0
    try:
        check_usable(target)
    except UnusableTargetError as error:
        sys.stderr.write(f"conformance: {error}\n")
        return 2
    status = run(collector, *(("-k", given.k) if given.k else ()))
    report = collector.report()
    console.print(to_table(report))
    for path, text in ((given.json, to_json(report)), (given.markdown, to_markdown(report))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if status in _PYTEST_BROKE or not report.checks:
        return 2
    return 0 if report.all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
