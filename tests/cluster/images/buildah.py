"""buildah with a storage of its own, and what it needs on the machine."""

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
    """An image cannot be built; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buildah:
    """Builds and keeps images below one directory.

    Attributes:
        directory: all that buildah writes.
        environment: what programs that call buildah need in theirs.
    """

    directory: Path
    environment: Mapping[str, str]

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Runs ``buildah``.

        Returns:
            What it writes to standard output.

        Raises:
            ImageBuildError: it failed; the message has the end of its output.
        """
        return run(["buildah", *arguments], environment=self.environment, cwd=cwd)

    def build(self, file: Path, *, context: Path, tag: str, arguments: Mapping[str, str]) -> None:
        """Builds one image.

        Args:
            file: the Containerfile.
            context: what it copies from.
            tag: what the image is called, or where it goes (``oci:directory:name``).
            arguments: of the build, by name.
        """
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        self.run("build", "--quiet", "--file", str(file), *given, "--tag", tag, str(context))

    def reference(self, name: str) -> str | None:
        """An image of the storage by its digest, ``localhost/cloister/NAME@sha256:…``; none if it is not there."""
        for image in json.loads(self.run("images", "--json")):
            if f"{PREFIX}/{name}:latest" in image["names"]:
                return f"{PREFIX}/{name}@{image['digest']}"
        return None


def require_programs() -> None:
    """Looks for what images are built with.

    Raises:
        ImageBuildError: something is missing, or this is not root.
    """
    if os.geteuid() != 0:
        raise ImageBuildError("images of the whole cluster are built as root: run this as root, e.g. by sudo")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise ImageBuildError(
            f"{' and '.join(missing)} must be on PATH; on Debian: apt-get install {' '.join(_PROGRAMS)}"
        )


def require_room(directory: Path, size_gb: int) -> None:
    """Looks for room on a disk.

    Raises:
        ImageBuildError: there is less.
    """
    free_gb = shutil.disk_usage(directory).free // 10**9
    if free_gb < size_gb:
        raise ImageBuildError(
            f"{size_gb} GB must be free at {directory}, and {free_gb} GB are: make room, or use another disk"
        )


@contextmanager
def buildah(directory: Path) -> Iterator[Buildah]:
    """A storage that stays for the next time; containers that a build that was cut off has left are removed.

    Args:
        directory: is made if it is not there; it may be deleted as a whole.
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
    """Runs a program of the build.

    Raises:
        ImageBuildError: it failed; the message has the end of its output.
    """
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
        raise ImageBuildError(f"`{' '.join(command)}` ended with {done.returncode}:\n{end}")
    return done.stdout
