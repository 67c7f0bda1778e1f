"""Write evidence about a stack for auditors, and verify it: ``cloister-evidence``, or ``python -m infra.evidence``.

    cloister-evidence write --state state.json --out evidence
    cloister-evidence write --stack-file Pulumi.dev.yaml --out evidence --since evidence-of-last-year --key receipt-key
    cloister-evidence verify evidence --public-key public-key.pem

It is no subcommand of ``cloister``: the service never imports the Pulumi program.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from infra.evidence.content import Content, content_of
from infra.evidence.folder import EvidenceError, problems, read_content, write_folder
from infra.evidence.state import StateError, read_state
from infra.rendering.render import RenderError, record_stack
from service.errors import SettingsError
from service.signing import read_key_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a mandatory policy is not met, or a folder was changed."""
    parser = argparse.ArgumentParser(prog="cloister-evidence", description="Write and verify evidence about a stack.")
    commands = parser.add_subparsers(required=True, dest="command")
    write = commands.add_parser("write", help="write a folder with a report")
    source = write.add_mutually_exclusive_group(required=True)
    source.add_argument("--state", type=Path, help="file of `pulumi stack export`")
    source.add_argument("--stack-file", type=Path, help="stack file; shows what would be deployed")
    write.add_argument("--out", type=Path, default=Path("evidence"), help="new or empty folder (default: evidence)")
    write.add_argument("--since", type=Path, help="folder of an earlier report, to list what changed")
    write.add_argument("--key", type=Path, help="private key that signs the manifest: 64 hexadecimal digits")
    verify = commands.add_parser("verify", help="verify a folder")
    verify.add_argument("folder", type=Path, help="the folder")
    verify.add_argument("--public-key", type=Path, help="public key in PEM; without it only digests are checked")
    options = parser.parse_args(arguments)
    try:
        return _write(options) if options.command == "write" else _verify(options)
    except (EvidenceError, StateError, RenderError, SettingsError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _write(options: argparse.Namespace) -> int:
    key = read_key_file(options.key, setting="--key") if options.key else None
    since = read_content(options.since) if options.since else None
    now = datetime.now(UTC)
    content = _of_state(options.state, now) if options.state else _of_stack_file(options.stack_file, now)
    write_folder(options.out, content, since=since, key=key)
    failed = [each for each in content["policies"] if each["status"] == "not met"]
    mandatory = [each["id"] for each in failed if each["severity"] == "mandatory"]
    sys.stdout.write(
        f"The report is {options.out / 'report.html'}, {'signed' if key else 'not signed (--key signs it)'}. "
        f"{len(content['policies'])} policies, {len(failed)} not met, {len(mandatory)} of them mandatory"
        f"{': ' if mandatory else ''}{', '.join(mandatory)}\n"
    )
    return 1 if mandatory else 0


def _of_state(path: Path, now: datetime) -> Content:
    state = read_state(path)
    times = {
        resource.urn.rpartition("::")[2]: (state.created.get(resource.urn, ""), state.modified.get(resource.urn, ""))
        for resource in state.recording.resources
        if resource.type.endswith(":Secret")
    }
    return content_of(
        state.recording,
        source="state",
        stack=state.stack,
        now=now,
        key_times=times,
        made_by_charts=state.made_by_charts,
    )


def _of_stack_file(path: Path, now: datetime) -> Content:
    stack = path.stem.removeprefix("Pulumi.")
    return content_of(record_stack(path), source="stack file", stack=stack, now=now, key_times={})


def _verify(options: argparse.Namespace) -> int:
    public_key = options.public_key.read_text(encoding="utf-8", errors="replace") if options.public_key else None
    found = list(problems(options.folder, public_key=public_key))
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    if found:
        return 1
    checked = "and the signature is valid" if public_key else "; the signature was not checked (--public-key)"
    sys.stdout.write(f"No file was changed {checked}.\n".replace(" ;", ";"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
