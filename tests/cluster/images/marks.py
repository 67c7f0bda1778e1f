"""Records of the content of each built image, to build an image only if something has changed."""

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def fingerprint(*parts: str | Path) -> str:
    """Return a hash of everything that an image is built from.

    Args:
        parts: texts, files, and directories with all their files except bytecode.
    """
    known = hashlib.sha256()
    for part in parts:
        for name, content in [("", part.encode())] if isinstance(part, str) else _files(part):
            known.update(f"{name}\0{len(content)}\0".encode() + content)
    return known.hexdigest()


def _files(path: Path) -> list[tuple[str, bytes]]:
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    files = (file for file in found if file.is_file() and "__pycache__" not in file.parts)
    return [(str(file.relative_to(path.parent)), file.read_bytes()) for file in files]


@dataclass(frozen=True, slots=True)
class Marks:
    """Directory with the fingerprint of each built image.

    Attributes:
        directory: created if it is missing.
    """

    directory: Path

    def build(self, name: str, made_of: str, build: Callable[[], None], *, there: bool) -> None:
        """Build an image unless it exists with the same fingerprint, and print how long it took.

        Args:
            name: name of the image.
            made_of: fingerprint of its content.
            build: function that builds it.
            there: whether the image exists.
        """
        self.directory.mkdir(exist_ok=True)
        mark = self.directory / name
        if there and mark.exists() and mark.read_text() == made_of:
            return
        mark.unlink(missing_ok=True)
        sys.stderr.write(f"building the image {name}\n")
        start = time.monotonic()
        build()
        sys.stderr.write(f"built the image {name} in {time.monotonic() - start:.0f} s\n")
        mark.write_text(made_of)
