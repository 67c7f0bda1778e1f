"""Write the manifests that `pulumi up` would apply: one file for each resource, for review and for GitOps.

    python -m infra.rendering.render --stack dev --out manifests

It needs no cluster, no Pulumi CLI, no network and no secrets: each secret value is ``<secret>``. A stack that
breaks its policies has no manifests; all problems are printed.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from infra.policy.assessment import refusal_text, refusals
from infra.rendering.manifests import manifests
from infra.rendering.recording import Path as FieldPath
from infra.rendering.recording import Recording, record
from infra.shared_platform.outputs import expected_outputs
from infra.stack_file.reading import read_stack_file
from infra.stack_file.sections import PROJECT
from ray_job.contract.cluster import jobs_namespace

HIDDEN: Final = "<secret>"
INDEX: Final = "rendered-files.txt"
"""List of the files of a run. The next run deletes those that it does not write again."""

_FIRST_FIELDS: Final = ("apiVersion", "kind", "metadata")
_CLUSTER: Final = "cluster"
"""Folder of cluster-scoped objects."""
_CHARTS: Final = "helm"
"""Folder of charts with their values; Helm creates their manifests."""


class RenderError(Exception):
    """A stack cannot be rendered; the message contains the reason and what to do."""


def record_stack(path: Path) -> Recording:
    """Run the program with a stack file, without a cluster and without its check of policies.

    Args:
        path: ``Pulumi.<stack>.yaml``, or a file like it.

    Raises:
        RenderError: the file does not exist or is invalid.
    """
    from pulumi import RunError

    from infra.program import run_unchecked

    try:
        file = read_stack_file(path)
    except (OSError, ValueError) as error:
        raise RenderError(f"{path} cannot be read: {error}") from error
    # Pulumi passes text as it is, and all other values as JSON.
    config = {
        f"{PROJECT}:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in file.values.items()
    }
    secret_keys = frozenset(f"{PROJECT}:{key}" for key in file.secret_keys)
    try:
        return record(
            run_unchecked,
            config=config,
            secret_keys=secret_keys,
            stack=file.stack,
            references=platform_outputs(file.values),
        )
    except RunError as error:
        raise RenderError(str(error)) from error


def platform_outputs(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return outputs of the platform that a stack file names, by the platform's stack, in place of the real ones."""
    section = values.get("platform")
    if not isinstance(section, Mapping) or "stack" not in section:
        return {}
    service = f"cloister-{values.get('customer')}-{values.get('environment')}"
    return {str(section["stack"]): expected_outputs(jobs_namespace(service))}


def rendered(recording: Recording) -> dict[str, str]:
    """Return the text of each manifest by its file name, e.g. ``cloister-acme-dev/deployment-api.yaml``.

    Raises:
        RenderError: two resources have the same file name.
    """
    files: dict[str, str] = {}
    for manifest in manifests(recording):
        if manifest.body.get("apiVersion") == "helm.sh":
            segments = (_CHARTS, manifest.name)
        else:
            group = str(manifest.body.get("apiVersion", "")).partition("/")[0]
            # Different groups have resources of the same kind: Cluster, Service, Backup.
            kind = manifest.kind if not group.count(".") or group.endswith("k8s.io") else f"{manifest.kind}.{group}"
            kind = f"{kind}-patch" if manifest.patch else kind
            segments = (manifest.namespace or _CLUSTER, f"{kind.lower()}-{manifest.name}")
        folder, file = (re.sub(r"[^A-Za-z0-9.-]", "_", segment) for segment in segments)
        name = f"{folder}/{file}.yaml"
        if name in files:
            raise RenderError(f"two resources are {manifest.title}: this is a bug in the program, please report it")
        body = _hidden(manifest.body, (), manifest.secrets)
        first = {key: body.pop(key) for key in _FIRST_FIELDS if key in body}
        files[name] = yaml.dump(first | body, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return dict(sorted(files.items()))


def _hidden(value: Any, path: FieldPath, secrets: frozenset[FieldPath]) -> Any:
    """Return a value with its secrets hidden and its fields sorted."""
    if isinstance(value, Mapping):
        # Only the values of an object are hidden: the names of a Secret's files are not secret.
        inside = secrets | {(*path, key) for key in value} if path in secrets else secrets
        return {key: _hidden(value[key], (*path, key), inside) for key in sorted(value)}
    if path in secrets:
        return HIDDEN
    if isinstance(value, list):
        return [_hidden(item, (*path, index), secrets) for index, item in enumerate(value)]
    return value


class _Dumper(yaml.SafeDumper):
    """YAML dumper with block style for text of several lines, so that a script in a ConfigMap is readable."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def write(files: Mapping[str, str], directory: Path) -> None:
    """Write the files to a directory, and delete the other files of an earlier run.

    Raises:
        RenderError: the directory contains files that no earlier run wrote.
    """
    index = directory / INDEX
    if index.exists():
        for name in index.read_text(encoding="utf-8").split():
            (directory / name).unlink(missing_ok=True)
        for folder in directory.iterdir():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    elif directory.exists() and any(directory.iterdir()):
        raise RenderError(f"{directory} contains files that were not rendered: use a new or an empty directory")
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    index.write_text("".join(f"{name}\n" for name in files), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.rendering.render", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--stack", required=True, help="the stack's name, or the path of a stack file")
    parser.add_argument("--out", required=True, type=Path, help="output directory: new, empty, or from an earlier run")
    options = parser.parse_args(arguments)
    path = Path(options.stack) if options.stack.endswith(".yaml") else Path(f"Pulumi.{options.stack}.yaml")
    try:
        recording = record_stack(path)
        refused = refusals(recording, today=datetime.now(UTC).date())
        files = rendered(recording)
        if not refused:
            write(files, options.out)
    except RenderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if refused:
        sys.stderr.write(f"{refusal_text(refused, stack=path.name)}\n")
        return 1
    sys.stderr.writelines(f"{message}\n" for message in recording.messages)
    sys.stdout.write(f"{len(files)} manifests of {path} are in {options.out}; secret values are {HIDDEN}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
