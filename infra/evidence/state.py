"""Exported state of a stack (`pulumi stack export`) as a recording. Secrets are never read: they become None."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infra.rendering.manifests import HELM_TYPES, is_made_by_chart
from infra.rendering.recording import Path as FieldPath
from infra.rendering.recording import RecordedResource, Recording

# Pulumi's marks of a secret in its state: sdk/go/common/resource/sig.go.
_SIGNATURE: Final = "4dabf18193072939515e22adb298388d"
_SECRET: Final = "1b47061264138c4ac30d75fd1eb44270"  # noqa: S105 - a mark
_STACK_TYPE: Final = "pulumi:pulumi:Stack"


class StateError(Exception):
    """A file is no exported state; the message contains the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedState:
    """A state.

    Attributes:
        stack: name of the stack.
        recording: its resources, except those that charts create.
        made_by_charts: number of the resources that charts create.
        created: when Pulumi created each Secret, by the Secret's URN; RFC 3339.
        modified: when Pulumi changed it last.
    """

    stack: str
    recording: Recording
    made_by_charts: int
    created: Mapping[str, str]
    modified: Mapping[str, str]


def read_state(path: Path) -> ExportedState:
    """Read an exported state.

    Raises:
        StateError: the file is unreadable, or no state with resources.
    """
    advice = "write it with `pulumi stack export --file FILE`"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        resources = content["deployment"]["resources"]
        stack = next(each["urn"].split("::")[0].rpartition(":")[2] for each in resources)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}; {advice}") from error
    except (ValueError, KeyError, TypeError, StopIteration):
        # The file may hold secrets in plain text: the message quotes nothing of it.
        raise StateError(f"{path} is no exported state with resources; {advice}") from None
    own, made_by_charts = [], 0
    for each in resources:
        if each.get("delete") or each["type"] == _STACK_TYPE:
            continue
        if is_made_by_chart(each["urn"]):
            made_by_charts += 1
        else:
            own.append(each)
    secrets = [each for each in own if each["type"].endswith(":Secret")]
    return ExportedState(
        stack=stack,
        recording=Recording(
            resources=tuple(_resource(each) for each in own), outputs={}, secret_outputs=frozenset(), messages=()
        ),
        made_by_charts=made_by_charts,
        created={each["urn"]: each["created"] for each in secrets if each.get("created")},
        modified={each["urn"]: each["modified"] for each in secrets if each.get("modified")},
    )


def _resource(raw: Mapping[str, Any]) -> RecordedResource:
    secrets: set[FieldPath] = set()
    inputs = {key: _without_secrets(value, (key,), secrets) for key, value in (raw.get("inputs") or {}).items()}
    return RecordedResource(
        type=raw["type"],
        name=raw["urn"].rpartition("::")[2],
        inputs=inputs,
        secrets=frozenset(secrets),
        custom=bool(raw.get("custom")) or raw["type"] in HELM_TYPES,
        urn=raw["urn"],
        parent=raw.get("parent", ""),
        provider=raw.get("provider", ""),
        protect=bool(raw.get("protect")),
        retain_on_delete=bool(raw.get("retainOnDelete")),
        delete_before_replace=None,
        dependencies=tuple(raw.get("dependencies") or ()),
        ignore_changes=(),
    )


def _without_secrets(value: Any, path: FieldPath, secrets: set[FieldPath]) -> Any:
    """Return a value with None in place of each secret, and add the paths of the secrets."""
    if isinstance(value, Mapping):
        if value.get(_SIGNATURE) == _SECRET:
            secrets.add(path)
            return None
        return {key: _without_secrets(item, (*path, key), secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, (*path, index), secrets) for index, item in enumerate(value)]
    return value
