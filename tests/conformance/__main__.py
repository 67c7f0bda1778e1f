"""Run the suite: ``python -m tests.conformance --base-url … --api-key … --model …``; ``--help`` lists all options.

Exit status: 0 if every check that ran holds, 1 if one does not hold, 2 if the server could not be checked.
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
_PYTEST_FAILED: Final = (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; base URL and API key default to the environment variables of the official clients."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Check a server against OpenAI's Files and Batches contract, from outside.",
    )
    add = parser.add_argument
    add(
        "--base-url",
        default=os.environ.get("OPENAI_BASE_URL"),
        help="base URL that ends with /v1; default: OPENAI_BASE_URL",
    )
    add(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="default: OPENAI_API_KEY, which process lists do not show",
    )
    add("--model", help="a model that answers /v1/chat/completions")
    add("--completions-model", help="a model that answers /v1/completions; default: --model")
    add("--embeddings-model", help="a model that answers /v1/embeddings; default: --model")
    add("--other-api-key", default="", help="a key of another project, to check isolation")
    add("--timeout", type=float, default=900, metavar="S", help="seconds to wait for the end of a batch (900)")
    add("--large", action="store_true", help="also upload a file over the limit of 200 MB")
    add("--extensions", action="store_true", help="also check cloister's extensions of the contract")
    add("--json", type=Path, metavar="FILE", help="write all results as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write all results as Markdown")
    add("-k", metavar="EXPRESSION", help="run only the checks that pytest's -k selects")
    add("--list", action="store_true", help="list the checks without running them; needs no server")
    options = parser.parse_args(arguments)
    missing = [name for name in ("base_url", "api_key", "model") if not getattr(options, name)]
    if missing and not options.list:
        parser.error(f"missing: {', '.join('--' + name.replace('_', '-') for name in missing)}")
    return options


def target_of(options: argparse.Namespace) -> Target:
    """Build the target from the options."""
    return Target(
        base_url=(options.base_url or "").rstrip("/"),
        api_key=options.api_key or "",
        model=options.model or "",
        completions_model=options.completions_model or options.model or "",
        embeddings_model=options.embeddings_model or options.model or "",
        timeout_s=options.timeout,
        large=options.large,
        other_api_key=options.other_api_key,
    )


def run(collector: Collector, *more: str) -> int:
    """Run the checks and return pytest's exit status. Pytest's own output appears only if pytest itself failed."""
    arguments = [str(_HERE), f"--config-file={_HERE / 'pytest.ini'}", "--quiet", *more]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main(arguments, plugins=[_CollectorPlugin(collector)])
    if status in _PYTEST_FAILED:
        sys.stderr.write(printed.getvalue())
    return int(status)


class _CollectorPlugin:
    """Plugin that registers the collector under the name that the conftest looks up."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._collector, PLUGIN_NAME)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a server, print the table and return the exit status."""
    options = parse_options(arguments)
    target = target_of(options)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    collector = Collector(target, extensions=options.extensions, console=console)
    if options.list:
        status = run(collector, "--collect-only")
        for area, point, text in collector.listed:
            print(area, point, text, sep="\t")  # noqa: T201 - the output of --list
        return 2 if status in _PYTEST_FAILED else 0
    try:
        check_usable(target)
    except UnusableTargetError as error:
        sys.stderr.write(f"conformance: {error}\n")
        return 2
    status = run(collector, *(("-k", options.k) if options.k else ()))
    report = collector.report()
    console.print(to_table(report))
    for path, text in ((options.json, to_json(report)), (options.markdown, to_markdown(report))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if status in _PYTEST_FAILED or not report.checks:
        return 2
    return 0 if report.all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
