"""Exported states, as `pulumi stack export` writes them, from recordings."""

import json
from pathlib import Path
from typing import Any

from infra.evidence.state import _SECRET, _SIGNATURE
from infra.rendering.recording import Recording

CIPHERTEXT = "v1:AAAAAAAAAAAAAAAA:of-no-interest"


def state_of(recording: Recording) -> dict[str, Any]:
    """Return the state after a deployment of everything in a recording."""

    def hidden(value: Any, path: tuple[str | int, ...], secrets: frozenset[tuple[str | int, ...]]) -> Any:
        if path in secrets:
            return {_SIGNATURE: _SECRET, "ciphertext": CIPHERTEXT}
        if isinstance(value, dict):
            return {key: hidden(item, (*path, key), secrets) for key, item in value.items()}
        if isinstance(value, list):
            return [hidden(item, (*path, index), secrets) for index, item in enumerate(value)]
        return value

    resources = [
        {
            "urn": each.urn,
            "type": each.type,
            "custom": each.custom and not each.type.endswith(":Chart"),
            "inputs": hidden(each.inputs, (), each.secrets),
            "protect": each.protect,
            "retainOnDelete": each.retain_on_delete,
            "created": "2026-01-02T03:04:05Z",
            "modified": "2026-02-03T04:05:06Z",
        }
        for each in recording.resources
    ]
    return {"version": 3, "deployment": {"manifest": {}, "resources": resources}}


def write_state(path: Path, recording: Recording) -> Path:
    path.write_text(json.dumps(state_of(recording)))
    return path
