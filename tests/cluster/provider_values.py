"""Pulumi's values in the provider protocol as Python values, with markers for secrets and unknown values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import struct_pb2
from pulumi.runtime import rpc

UNKNOWN: Final = rpc.UNKNOWN
_SIGNATURE: Final = rpc._special_sig_key
_SECRET: Final = rpc._special_secret_sig


@dataclass(frozen=True, slots=True)
class Secret:
    """A value that is encrypted in the state and hidden in all displays."""

    value: Any


def from_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return the fields of a message; ``Secret`` wraps secrets, ``UNKNOWN`` replaces values that only `up` knows."""
    return {key: _from_value(value) for key, value in struct.fields.items()}


def _from_value(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_from_value(item) for item in value.list_value.values]
    if kind == "struct_value":
        fields = from_struct(value.struct_value)
        return Secret(fields["value"]) if fields.get(_SIGNATURE) == _SECRET else fields
    if kind == "number_value":
        return int(value.number_value) if value.number_value.is_integer() else value.number_value
    return None if kind == "null_value" else getattr(value, str(kind))


def to_struct(fields: Mapping[str, Any]) -> struct_pb2.Struct:
    """Return the message for some fields."""
    struct = struct_pb2.Struct()
    struct.update({key: _wire(value) for key, value in fields.items()})
    return struct


def _wire(value: Any) -> Any:
    if isinstance(value, Secret):
        return {_SIGNATURE: _SECRET, "value": _wire(value.value)}
    if isinstance(value, Mapping):
        return {key: _wire(item) for key, item in value.items()}
    return [_wire(item) for item in value] if isinstance(value, list) else value


def revealed(value: Any) -> Any:
    """Return the value with its secrets in clear text."""
    if isinstance(value, Secret):
        return revealed(value.value)
    if isinstance(value, Mapping):
        return {key: revealed(item) for key, item in value.items()}
    return [revealed(item) for item in value] if isinstance(value, list) else value


def hidden_like(value: Any, pattern: Any) -> Any:
    """Return ``value`` with secrets wherever ``pattern`` has them."""
    if isinstance(pattern, Secret):
        return Secret(revealed(value))
    if isinstance(value, Mapping) and isinstance(pattern, Mapping):
        return {key: hidden_like(item, pattern.get(key)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(pattern, list):
        missing = [None] * (len(value) - len(pattern))
        return [hidden_like(item, like) for item, like in zip(value, [*pattern, *missing], strict=False)]
    return value


def has_unknown(value: Any) -> bool:
    """Return whether any part of the value is unknown."""
    if isinstance(value, Mapping):
        return any(has_unknown(item) for item in value.values())
    if isinstance(value, list):
        return any(has_unknown(item) for item in value)
    return bool(value == UNKNOWN)


def differences(old: Any, new: Any, path: str = "") -> dict[str, str]:
    """Return the changed paths (``spec.replicas``, ``spec.containers[0].image``), each with add, delete or update."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, str] = {}
        for key in old.keys() | new.keys():
            inner = f"{path}.{key}" if path else key
            if "." in key or "/" in key:
                inner = f'{path}["{key}"]'
            if key not in new:
                found[inner] = "delete"
            elif key not in old:
                found[inner] = "add"
            else:
                found |= differences(old[key], new[key], inner)
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return {key: kind for i, (a, b) in pairs for key, kind in differences(a, b, f"{path}[{i}]").items()}
    return {} if old == new else {path: "update"}
