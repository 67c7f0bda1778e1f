"""The folder of evidence: its files, the manifest of their digests, and its verification."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from infra.evidence import documents, oscal
from infra.evidence.content import Content, changes
from infra.evidence.flows import drawing
from service.signing import Envelope, is_signed, public_pem, read_public_key, signed_envelope

MANIFEST: Final = "manifest.json"
CONTENT: Final = "evidence.json"
PUBLIC_KEY: Final = "public-key.pem"
PAYLOAD_TYPE: Final = "application/vnd.cloister.evidence+json"


class EvidenceError(Exception):
    """A folder cannot be written or read; the message contains the remedy."""


def write_folder(
    directory: Path, content: Content, *, since: Content | None = None, key: Ed25519PrivateKey | None = None
) -> None:
    """Write all files of a report, and their manifest.

    Args:
        directory: the folder; it must be new or empty.
        content: the content.
        since: content of an earlier report, to list what changed.
        key: the key that signs the manifest; without it the manifest is not signed.

    Raises:
        EvidenceError: the folder has files, or cannot be written.
    """
    changed = None if since is None else changes(since, content)
    picture = drawing(content["flows"])
    files = {
        "report.html": documents.html(content, changed, picture, signed=key is not None),
        "report.md": documents.markdown(content, changed, signed=key is not None),
        "network.svg": picture,
        CONTENT: _json(content),
        "assessment-results.json": _json(oscal.assessment_results(content)),
        "component-definition.json": _json(oscal.component_definition(content)),
    }
    if changed is not None:
        files["changes.json"] = _json(changed)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
    manifest = {"stack": content["stack"]["name"], "assessed_at": content["stack"]["assessed_at"], "sha256": digests}
    envelope = None
    if key is not None:
        payload = json.dumps(manifest, sort_keys=True).encode()
        envelope = signed_envelope(key, PAYLOAD_TYPE, payload).model_dump()
        # For convenience. Who verifies takes the key from elsewhere.
        files[PUBLIC_KEY] = public_pem(key)
    files[MANIFEST] = _json({"manifest": manifest, "envelope": envelope})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise EvidenceError(f"{directory} contains files: use a new or an empty folder")
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EvidenceError(f"{directory} cannot be written: {error.strerror}; use another folder") from error


def read_content(directory: Path) -> Content:
    """Return the content of a folder whose files are unchanged.

    Raises:
        EvidenceError: the folder is no evidence, or was changed.
    """
    if found := list(problems(directory)):
        raise EvidenceError(f"{directory}: {'; '.join(found)}")
    content: Content = json.loads((directory / CONTENT).read_text(encoding="utf-8"))
    return content


def problems(directory: Path, *, public_key: str | None = None) -> Iterator[str]:
    """Yield what is wrong with a folder: changed, missing and added files, and a wrong signature.

    Args:
        directory: the folder.
        public_key: the public key in PEM of who signed it; None to check digests only.
    """
    try:
        text = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        manifest, envelope = text["manifest"], text["envelope"]
        digests: Mapping[str, str] = dict(manifest["sha256"])
        parsed = None if envelope is None else Envelope.model_validate(envelope)
        signed = None if parsed is None else json.loads(base64.b64decode(parsed.payload, validate=True))
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        yield f"{MANIFEST} is missing or unreadable: this is no folder of evidence, or it was changed"
        return
    for name, digest in digests.items():
        try:
            actual = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        except OSError:
            yield f"{name} is missing"
        else:
            if actual != digest:
                yield f"{name} was changed"
    known = {*digests, MANIFEST, *([PUBLIC_KEY] if parsed else [])}
    yield from (f"{each.name} was added" for each in sorted(directory.iterdir()) if each.name not in known)
    if parsed and signed != manifest:
        yield f"{MANIFEST} was changed: it differs from the signed one"
    if public_key is not None:
        yield from _signature_problems(parsed, public_key)


def _signature_problems(envelope: Envelope | None, public_key: str) -> Iterator[str]:
    key = read_public_key(public_key)
    if key is None:
        yield "the public key is not an Ed25519 key in PEM; `cloister receipts public-key` prints that of a stack"
    elif envelope is None:
        yield f"{MANIFEST} is not signed"
    else:
        try:
            is_valid = is_signed(key, envelope, PAYLOAD_TYPE)
        except ValueError:
            is_valid = False
        if not is_valid:
            yield f"the signature of {MANIFEST} is wrong: it was changed, or signed with another key"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n"
