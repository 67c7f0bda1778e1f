"""Two base images: for the images themselves, and for their build stages."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.images.buildah import Buildah, ImageBuildError, run
from tests.cluster.images.image import PREFIX
from tests.cluster.images.marks import Marks, fingerprint

HERE: Final = Path(__file__).parent
_SUITE: Final = "bookworm"
_PACKAGES: Final = ("ca-certificates", "libnuma1", "python3")
_LEFT_OUT: Final = (
    "./dev/*",
    "./etc/hostname",
    "./etc/resolv.conf",
    "./usr/share/doc/*",
    "./usr/share/locale/*",
    "./usr/share/man/*",
    "./var/cache/apt/*",
    "./var/lib/apt/lists/*",
    "./var/log/*",
)
_AUTHORITIES: Final = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bases:
    """References of both bases by digest: ``runtime`` for images, ``build`` for build stages."""

    runtime: str
    build: str


def make_bases(engine: Buildah, marks: Marks) -> Bases:
    """Build the bases that are missing in the storage or out of date.

    Raises:
        ImageBuildError: the message contains the reason.
    """
    file = HERE / "base.Containerfile"
    made_of = fingerprint(_SUITE, *_PACKAGES, *_LEFT_OUT, file)
    marks.build("base", made_of, lambda: _runtime_base(engine, file), there=engine.reference("base") is not None)
    runtime = _reference(engine, "base")

    authorities = Path(os.environ.get("SSL_CERT_FILE", _AUTHORITIES))
    if not authorities.exists():
        raise ImageBuildError(f"{authorities} is missing: install ca-certificates, or set SSL_CERT_FILE")
    build_file = HERE / "build-base.Containerfile"
    marks.build(
        "build-base",
        fingerprint(runtime, authorities, build_file),
        lambda: _build_base(engine, build_file, runtime, authorities),
        there=engine.reference("build-base") is not None,
    )
    return Bases(runtime=runtime, build=_reference(engine, "build-base"))


def _runtime_base(engine: Buildah, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=engine.directory) as directory:
        root, context = Path(directory) / "root", Path(directory) / "context"
        context.mkdir()
        run(["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(root)])
        left_out = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
        run(["tar", "-C", str(root), "--one-file-system", *left_out, "-cf", str(context / "rootfs.tar"), "."])
        engine.build(file, context=context, tag=f"{PREFIX}/base", arguments={})


def _build_base(engine: Buildah, file: Path, runtime: str, authorities: Path) -> None:
    with tempfile.TemporaryDirectory(dir=engine.directory) as directory:
        shutil.copy(authorities, Path(directory) / "ca-certificates.crt")
        engine.build(file, context=Path(directory), tag=f"{PREFIX}/build-base", arguments={"BASE": runtime})


def _reference(engine: Buildah, name: str) -> str:
    if reference := engine.reference(name):
        return reference
    raise ImageBuildError(f"{PREFIX}/{name} was built and is not in {engine.directory}: delete that directory")
