"""The manifest of a pushed model: its files with their digests, and what they hold.

The digest of a model is the SHA-256 of its manifest, so it pins every byte that an engine loads.
"""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final

MANIFEST_NAME: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 4 << 20
VERSION: Final = 1
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """A manifest is not the one that its digest names, or is unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One file of a model: its path below the model's directory, its size in bytes and its SHA-256 in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        # Jobs write to these paths.
        if not is_model_path(self.path) or self.size_bytes < 0 or not _SHA256.fullmatch(self.sha256):
            raise ManifestError(f"the entry of the file {self.path!r} is invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest:
    """Description of a pushed model.

    Attributes:
        name: the name that it was pushed with.
        license: an SPDX expression; empty if it is unknown.
        architecture: the first of ``architectures`` in config.json; empty without one.
        dtype: the data type of most weights, by vLLM's name; empty if it is unknown.
        quantization: the quantization method in config.json; empty for none.
        parameters: numbers in the safetensors files that an engine loads; packed numbers count once.
        weights_bytes: size of these files in bytes.
        tokenizer_class: of tokenizer_config.json; empty without one.
        chat_template: path of the file that holds the chat template; empty without one.
        accelerators: names of the built-in accelerators of which one unit runs an engine.
        files: all files, in the order of their paths.
    """

    name: str
    license: str
    architecture: str
    dtype: str
    quantization: str
    parameters: int
    weights_bytes: int
    tokenizer_class: str
    chat_template: str
    accelerators: tuple[str, ...]
    files: tuple[ModelFile, ...]

    @property
    def total_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> bytes:
        """Write the manifest as canonical JSON: sorted keys, no white space, UTF-8."""
        fields = {"version": VERSION, "total_bytes": self.total_bytes, **dataclasses.asdict(self)}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def digest(self) -> str:
        """The digest of the model: ``sha256:`` and 64 hexadecimal digits."""
        return digest_of(self.to_json())

    @classmethod
    def from_json(cls, content: bytes, digest: str) -> "ModelManifest":
        """Read what ``to_json`` has written.

        Args:
            content: the manifest.
            digest: the digest that it must have.

        Raises:
            ManifestError: it has another digest, or is not a manifest that this version reads.
        """
        if (found := digest_of(content)) != digest:
            raise ManifestError(f"{MANIFEST_NAME} of the model {digest} has the digest {found}")
        try:
            fields: dict[str, Any] = json.loads(content)
            version, _ = fields.pop("version"), fields.pop("total_bytes")
            if version == VERSION:
                files = tuple(ModelFile(**file) for file in fields.pop("files"))
                return cls(files=files, accelerators=tuple(fields.pop("accelerators")), **fields)
        except ManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(
                f"{MANIFEST_NAME} of the model {digest} is not a manifest: {type(error).__name__}"
            ) from None
        raise ManifestError(f"{MANIFEST_NAME} of the model {digest} has version {version}, not {VERSION}")


def digest_of(content: bytes) -> str:
    """Return the digest of a manifest: ``sha256:…``."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def is_model_path(path: str) -> bool:
    """Return whether a file of a model can have a path: relative, printable, no part empty or starting with a dot."""
    return path.isprintable() and all(part and not part.startswith(".") for part in path.split("/"))
