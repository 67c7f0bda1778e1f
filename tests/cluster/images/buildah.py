"""buildah with its own storage, and its requirements on the machine."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.images.image import PREFIX

_PROGRAMS: Final = ("buildah", "containerd", "debootstrap")
_LINES: Final = 30


class ImageBuildError(Exception):
    """An image could not be built; the message contains the reason and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buildah:
    """buildah with everything below one directory.

    Attributes:
        directory: directory of all files that buildah writes.
        environment: environment for programs that call buildah.
    """

    directory: Path
    environment: Mapping[str, str]

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run ``buildah`` and return its standard output.

        Raises:
            ImageBuildError: it failed; the message contains the end of its output.
        """
        return run(["buildah", *arguments], environment=self.environment, cwd=cwd)

    def build(self, file: Path, *, context: Path, tag: str, arguments: Mapping[str, str]) -> None:
        """Build one image.

        Args:
            file: the Containerfile.
            context: the build context.
            tag: name or destination of the image (``oci:directory:name``).
            arguments: build arguments by name.
        """
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        self.run("build", "--quiet", "--file", str(file), *given, "--tag", tag, str(context))

    def reference(self, name: str) -> str | None:
        """Return the reference of an image in the storage by digest, ``localhost/cloister/NAME@sha256:…``, or None."""
        for image in json.loads(self.run("images", "--json")):
            if f"{PREFIX}/{name}:latest" in (image["names"] or ()):  # a replaced image has no name left
                return f"{PREFIX}/{name}@{image['digest']}"
        return None


def require_programs() -> None:
    """Check for the programs that build images.

    Raises:
        ImageBuildError: a program is missing, or this process is not root.
    """
    if os.geteuid() != 0:
        raise ImageBuildError("images of the whole cluster are built as root: run this as root, e.g. by sudo")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise ImageBuildError(
            f"{' and '.join(missing)} must be on PATH; on Debian: apt-get install {' '.join(_PROGRAMS)}"
        )


def require_room(directory: Path, size_gb: int) -> None:
    """Check for free disk space.

    Raises:
        ImageBuildError: there is not enough.
    """
    free_gb = shutil.disk_usage(directory).free // 10**9
    if free_gb < size_gb:
        raise ImageBuildError(
            f"{size_gb} GB must be free at {directory}, and {free_gb} GB are: make room, or use another disk"
        )


@contextmanager
def buildah(directory: Path) -> Iterator[Buildah]:
    """Return buildah with a persistent storage; containers of interrupted builds are removed.

    Args:
        directory: directory for the storage, created if it is missing; it may be deleted as a whole.
    """
    temporary = directory / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    configuration = directory / "storage.conf"
    configuration.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{directory}/graph"\nrunroot = "{directory}/run"\n'
    )
    environment = os.environ | {
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(configuration),
        "TMPDIR": str(temporary),
    }
    opened = Buildah(directory=directory, environment=environment)
    opened.run("rm", "--all")
    try:
        yield opened
    finally:
        opened.run("rm", "--all")
        shutil.rmtree(temporary)


def run(command: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a program of the build and return its standard output.

    Raises:
        ImageBuildError: it failed; the message contains the end of its output.
    """
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
        raise ImageBuildError(f"`{' '.join(command)}` ended with {done.returncode}:\n{end}")
    return done.stdout
