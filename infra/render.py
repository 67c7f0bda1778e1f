"""Writes the manifests that `pulumi up` would apply: one file for each resource, for review and for GitOps.

    python -m infra.render --stack dev --out manifests

No cluster, no Pulumi CLI and no network is needed, and no secret is known: in place of each stands ``<secret>``.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from infra.config_schema import PROJECT
from infra.manifests import Manifest, manifests
from infra.recording import Path as FieldPath
from infra.recording import Recording, record
from infra.stack_file import read_stack_file

HIDDEN: Final = "<secret>"
INDEX: Final = "rendered-files.txt"
"""The list of what was written: the next run removes from the directory what is not made any more."""

_FIRST_FIELDS: Final = ("apiVersion", "kind", "metadata")
_CLUSTER: Final = "cluster"
"""The folder of what belongs to no namespace."""
_CHARTS: Final = "helm"
"""The folder of charts with their values: Helm makes the manifests of these."""


class RenderError(Exception):
    """A stack cannot be rendered; the message says why and what to do."""


def record_stack(path: Path) -> Recording:
    """Runs the program on a stack file, without a cluster.

    Args:
        path: ``Pulumi.<stack>.yaml``, or a file like it.

    Raises:
        RenderError: there is no such file, or it is wrong.
    """
    from pulumi import RunError

    from infra.program import run

    try:
        file = read_stack_file(path)
    except (OSError, ValueError) as error:
        raise RenderError(f"{path} cannot be read: {error}") from error
    config = {f"{PROJECT}:{key}": _as_pulumi(value) for key, value in file.values.items()}
    secret_keys = frozenset(f"{PROJECT}:{key}" for key in file.secret_keys)
    try:
        return record(run, config=config, secret_keys=secret_keys, stack=file.stack)
    except RunError as error:
        raise RenderError(str(error)) from error


def _as_pulumi(value: Any) -> str:
    """A value of a stack file as Pulumi hands it to the program: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def rendered(recording: Recording) -> dict[str, str]:
    """The text of each manifest by its file's name, e.g. ``cloister-acme-dev/deployment-api.yaml``.

    Raises:
        RenderError: two resources would be one file.
    """
    files: dict[str, str] = {}
    for manifest in manifests(recording):
        name = _file_name(manifest)
        if name in files:
            raise RenderError(f"two resources are {manifest.title}: the program is wrong, please report it")
        files[name] = _text(manifest)
    return dict(sorted(files.items()))


def _file_name(manifest: Manifest) -> str:
    if manifest.body.get("apiVersion") == "helm.sh":
        return f"{_CHARTS}/{_safe(manifest.name)}.yaml"
    group = str(manifest.body.get("apiVersion", "")).partition("/")[0]
    # A custom resource may have the kind of another one: Cluster, Service, Backup.
    kind = manifest.kind if not group.count(".") or group.endswith("k8s.io") else f"{manifest.kind}.{group}"
    kind = f"{kind}-patch" if manifest.patch else kind
    return f"{_safe(manifest.namespace or _CLUSTER)}/{_safe(kind.lower())}-{_safe(manifest.name)}.yaml"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", text)


def _text(manifest: Manifest) -> str:
    body = _hidden(manifest.body, (), manifest.secrets)
    order = [*(key for key in _FIRST_FIELDS if key in body), *sorted(body.keys() - set(_FIRST_FIELDS))]
    return yaml.dump(
        {key: _sorted(body[key]) for key in order}, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True
    )


def _hidden(value: Any, path: FieldPath, secrets: frozenset[FieldPath]) -> Any:
    if isinstance(value, Mapping):
        # A secret object keeps its keys: which files a Secret has is no secret.
        inside = secrets | {(*path, key) for key in value} if path in secrets else secrets
        return {key: _hidden(item, (*path, key), inside) for key, item in value.items()}
    if path in secrets:
        return HIDDEN
    if isinstance(value, list):
        return [_hidden(item, (*path, index), secrets) for index, item in enumerate(value)]
    return value


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as it is, so that a script in a ConfigMap can be read."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_node)


def write(files: Mapping[str, str], directory: Path) -> None:
    """Writes the files below a directory, and removes those of an earlier run that are not among them.

    Raises:
        RenderError: the directory holds something, and no earlier run wrote it.
    """
    index = directory / INDEX
    if index.exists():
        for name in index.read_text(encoding="utf-8").split():
            (directory / name).unlink(missing_ok=True)
        for folder in directory.iterdir():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    elif directory.exists() and any(directory.iterdir()):
        raise RenderError(f"{directory} holds files that were not rendered: name a new or an empty directory")
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    index.write_text("".join(f"{name}\n" for name in files), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m infra.render", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stack", required=True, help="the stack's name, or the path of a stack file")
    parser.add_argument("--out", required=True, type=Path, help="a directory: new, empty, or rendered before")
    options = parser.parse_args(arguments)
    path = Path(options.stack) if options.stack.endswith(".yaml") else Path(f"Pulumi.{options.stack}.yaml")
    try:
        recording = record_stack(path)
        files = rendered(recording)
        write(files, options.out)
    except RenderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.writelines(f"{message}\n" for message in recording.messages)
    sys.stdout.write(f"{len(files)} manifests of {path} are in {options.out}; secrets stand there as {HIDDEN}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
