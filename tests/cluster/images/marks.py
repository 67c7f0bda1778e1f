"""What each image was built of: nothing is built again while that is the same."""

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def fingerprint(*parts: str | Path) -> str:
    """Changes with anything that an image is built of.

    Args:
        parts: texts, files, and directories with all that is in them but bytecode.
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
    """A directory with the fingerprint of each image that is built.

    Attributes:
        directory: is made if it is not there.
    """

    directory: Path

    def build(self, name: str, made_of: str, build: Callable[[], None], *, there: bool) -> None:
        """Builds an image, unless it is there and made of the same; says how long it took.

        Args:
            name: of the image.
            made_of: its fingerprint.
            build: builds it.
            there: whether it exists.
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
