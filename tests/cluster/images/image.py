"""Images in an OCI layout: one directory with the blobs of all images by digest, so that shared blobs exist once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PREFIX: Final = "localhost/cloister"
_INDEX: Final = "index.json"
_NAME: Final = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One built image.

    Attributes:
        name: e.g. ``ray-cpu``.
        digest: digest of its manifest, ``sha256:…``.
        layout: directory of its blobs.
    """

    name: str
    digest: str
    layout: Path

    @property
    def reference(self) -> str:
        """Reference by digest, as pods use it."""
        return f"{PREFIX}/{self.name}@{self.digest}"

    def blob(self, digest: str) -> Path:
        """Return the file of a manifest, a configuration or a layer."""
        return self.layout / "blobs" / digest.replace(":", "/")

    def manifest(self) -> Mapping[str, Any]:
        """Return the image manifest."""
        return _json(self.blob(self.digest))

    def configuration(self) -> Mapping[str, Any]:
        """Return the image configuration: user, environment, command, labels and so on."""
        return _json(self.blob(self.manifest()["config"]["digest"]))

    def blobs(self) -> Mapping[str, Path]:
        """Return every file of the image by digest; layers first, the manifest last."""
        manifest = self.manifest()
        digests = [*(layer["digest"] for layer in manifest["layers"]), manifest["config"]["digest"], self.digest]
        return {digest: self.blob(digest) for digest in digests}


def images_in(layout: Path) -> Mapping[str, Image]:
    """Return the images of a layout by name; none if the layout does not exist yet."""
    if not (layout / _INDEX).exists():
        return {}
    names = {entry["annotations"][_NAME]: entry["digest"] for entry in _named(_json(layout / _INDEX))}
    images = {name.removeprefix(f"{PREFIX}/"): digest for name, digest in names.items()}
    return {name: Image(name=name, digest=digest, layout=layout) for name, digest in images.items()}


def remove_replaced_images(layout: Path) -> None:
    """Delete blobs of images without a name: a rebuilt image takes the name of the old one."""
    index = _json(layout / _INDEX)
    if (named := _named(index)) != index["manifests"]:
        # Another process may be reading it.
        unfinished = layout / f"{_INDEX}.new"
        unfinished.write_text(json.dumps({**index, "manifests": named}))
        unfinished.rename(layout / _INDEX)
    used = {path for image in images_in(layout).values() for path in image.blobs().values()}
    # Remains of an interrupted copy.
    for path in (*layout.glob("blobs/sha256/*"), *layout.glob("oci-put-blob*")):
        if path not in used:
            path.unlink()


def _named(index: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in index["manifests"] if _NAME in entry.get("annotations", {})]


def _json(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(path.read_text())
    return content
