"""Build the images of the whole cluster, into a directory outside of git.

    python -m tests.cluster.images.build [--out build/cluster]

Needs root, buildah, debootstrap, containerd, the programs of ``tests.cluster.build``, and mirrors of Debian's and
Python's packages. The images of the service and of Ray come from the project's Containerfiles, by ``images/build.sh``.
An image is built again only when something in it has changed. A change of code takes seconds, because the packages
(7 GB) are reused. Building packages needs 29 GB of free disk space; 23 GB stay in use.
"""

import argparse
import fcntl
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.build import DEFAULT_OUTPUT
from tests.cluster.images.bases import Bases, make_bases
from tests.cluster.images.buildah import Buildah, ImageBuildError, buildah, require_programs, require_room, run
from tests.cluster.images.image import PREFIX, Image, images_in, remove_replaced_images
from tests.cluster.images.marks import Marks, fingerprint
from tests.cluster.images.unpacking import unpack

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[2]
BUILT_IMAGES: Final = ("pause", "coredns", "ray-operator", "versitygw", "postgres", "service", "ray-cpu")
# Disk space of packages during a build: in the build stage, in the image, as a layer, and in the layout.
_ROOM_GB: Final = {"service": 1, "ray-cpu": 29}
_LAYOUT: Final = "layout"


def build_images(output: Path, programs: Path) -> Mapping[str, Image]:
    """Build and unpack the images that are missing or out of date.

    Args:
        output: directory for everything that is built; it may be deleted as a whole.
        programs: directory of the programs that the images contain.

    Returns:
        The images of ``BUILT_IMAGES`` by name.

    Raises:
        ImageBuildError: the message contains the reason and what to do.
    """
    require_programs()
    output = output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with buildah(output / "storage") as engine:
            marks = Marks(output / "built")
            bases = make_bases(engine, marks)
            _Builder(engine=engine, marks=marks, bases=bases, programs=programs.absolute(), output=output).build()
        remove_replaced_images(output / _LAYOUT)
        images = built_images(output)
        unpack(images.values(), output)
        return images


def built_images(output: Path) -> Mapping[str, Image]:
    """Return the images that ``build_images`` has built.

    Raises:
        ImageBuildError: an image is missing.
    """
    found = images_in(output / _LAYOUT)
    if missing := [name for name in BUILT_IMAGES if name not in found]:
        raise ImageBuildError(f"no image of {', '.join(missing)} is in {output}: python -m tests.cluster.images.build")
    return {name: found[name] for name in BUILT_IMAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    engine: Buildah
    marks: Marks
    bases: Bases
    programs: Path
    output: Path

    def build(self) -> None:
        self._from_program("pause", "pause")
        self._from_program("coredns", "program", program="coredns")
        self._from_program("ray-operator", "program", program="ray-operator")
        self._from_program("versitygw", "versitygw", program="versitygw")
        self._from_program("postgres", "postgres")
        self._variant("service", "pyproject.toml", "README.md", "LICENSE", "ray_job", "service")
        self._variant("ray-cpu", "ray_job")
        # Replaced images and intermediate stages.
        self.engine.run("rmi", "--prune", "--force")

    def _from_program(self, name: str, file: str, *, program: str = "") -> None:
        """Build an image of a Containerfile in this directory, with one of the programs or none."""
        containerfile = HERE / f"{file}.Containerfile"
        parts = [self.programs / program] if program else []
        missing = [path for path in parts if not path.exists()]
        if missing:
            raise ImageBuildError(f"{missing[0]} is missing; build it: python -m tests.cluster.build")
        arguments = {"BASE": self.bases.runtime, "BUILD_BASE": self.bases.build, "PROGRAM": program}
        used = {key: value for key, value in arguments.items() if f"ARG {key}\n" in containerfile.read_text()}

        def build() -> None:
            self.engine.build(containerfile, context=self.programs, tag=self._place(name), arguments=used)

        self._unless_built(name, fingerprint(containerfile, *used.values(), *parts), build)

    def _variant(self, variant: str, *sources: str) -> None:
        """Build an image of the project. Its packages are a separate image, to which code is added quickly."""
        containerfile = ROOT / f"images/{variant}.Containerfile"
        constraints = (ROOT / f"images/constraints/{variant}.txt", ROOT / "constraints/uv.txt")
        stages, last, _ = containerfile.read_text().partition("\nFROM packages\n")
        if not last:
            raise ImageBuildError(f"{containerfile} has no last stage on its stage `packages`")
        packages = f"{variant}-packages"
        self.marks.build(
            packages,
            fingerprint(self.bases.runtime, stages, *constraints),
            lambda: self._packages(packages, containerfile, room_gb=_ROOM_GB[variant]),
            there=self.engine.reference(packages) is not None and packages in images_in(self.output / _LAYOUT),
        )
        base = f"{self.engine.reference(packages)}"
        made_of = fingerprint(base, containerfile, *(ROOT / source for source in sources))
        self._unless_built(variant, made_of, lambda: self._code(variant, base))

    def _packages(self, name: str, containerfile: Path, *, room_gb: int) -> None:
        """Write straight into the layout: in the storage there would be five copies of 7 GB at a time."""
        require_room(self.output, room_gb)
        arguments = ["--build-arg", f"BASE={self.bases.runtime}", "--build-arg", f"BUILD_BASE={self.bases.build}"]
        arguments += ["--target", "packages", "--volume", _uv_cache(), "--tag", self._place(name)]
        self.engine.run("build", "--quiet", "--file", str(containerfile), *arguments, str(ROOT))
        # The image is named after the directory, which must be in lower case, so the path cannot be absolute.
        self.engine.run("pull", "--quiet", f"oci:{_LAYOUT}:{PREFIX}/{name}", cwd=self.output)
        self.engine.run("tag", f"localhost/{_LAYOUT}", f"{PREFIX}/{name}")
        self.engine.run("rmi", f"localhost/{_LAYOUT}")

    def _code(self, variant: str, packages: str) -> None:
        """Build the image as the project's users do, but on the packages that exist already."""
        options = f"--volume {_uv_cache()} --build-context packages=container-image://{packages}"
        settings = {"ENGINE": "buildah", "REPOSITORY": PREFIX, "PUSH": "", "OPTIONS": options}
        bases = {"BASE": self.bases.runtime, "BUILD_BASE": self.bases.build}
        said = run(
            [str(ROOT / "images/build.sh"), variant], environment={**self.engine.environment, **settings, **bases}
        )
        (tag,) = re.findall(rf"^built ({PREFIX}/{variant}:[^\s;]+)", said, flags=re.MULTILINE)
        # The packages are in the layout already, uncompressed: compressing Ray's takes minutes.
        self.engine.run("push", tag, self._place(variant))
        self.engine.run("rmi", tag)

    def _unless_built(self, name: str, made_of: str, build: Callable[[], None]) -> None:
        self.marks.build(name, made_of, build, there=name in images_in(self.output / _LAYOUT))

    def _place(self, name: str) -> str:
        return f"oci:{self.output / _LAYOUT}:{PREFIX}/{name}"


def _uv_cache() -> str:
    """Return a mount of the package cache of ``make setup``, so that packages are not downloaded twice."""
    directory = Path(run([str(Path(sys.executable).parent / "uv"), "cache", "dir"]).strip())
    directory.mkdir(parents=True, exist_ok=True)
    return f"{directory}:/root/.cache/uv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line that the module docstring describes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.images.build", description="Builds the images of the whole cluster."
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, help=f"default: {DEFAULT_OUTPUT}")
    output = parser.parse_args(arguments).out
    try:
        images = build_images(output / "images", output / "bin")
    except ImageBuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for image in images.values():
        sys.stdout.write(f"{image.reference}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
