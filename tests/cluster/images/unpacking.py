"""Unpacked images: unpacked by one containerd, and linked for each node of each run.

Unpacking Ray's image takes more than a minute of CPU time; linking its files takes a second.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from tests.cluster.images.buildah import ImageBuildError, require_room
from tests.cluster.images.containerd import containerd_for_images
from tests.cluster.images.image import Image
from tests.cluster.images.importing import ImportImageError, ctr, import_image, known_images
from tests.cluster.processes import ProcessError

_FOLDER: Final = "unpacked"
_ROOT: Final = "containerd"
_DONE: Final = "references.json"
# Size of all unpacked images, and together with their blobs.
ROOM_GB: Final = 9
_WITH_BLOBS_GB: Final = 17


def unpack(images: Collection[Image], output: Path) -> None:
    """Unpack new images, and remove images that are no longer used.

    Args:
        images: all images that must exist afterwards.
        output: parent directory of the layout.

    Raises:
        ImageBuildError: the disk is full, or containerd failed; the message contains its output.
    """
    wanted = sorted(image.reference for image in images)
    done = output / _FOLDER / _DONE
    if done.exists() and json.loads(done.read_text()) == wanted:
        return
    if not is_unpacked(output):
        # An interrupted run leaves names of images that are incomplete.
        shutil.rmtree(done.parent, ignore_errors=True)
        require_room(output, ROOM_GB)
    sys.stderr.write("unpacking the images\n")
    start = time.monotonic()
    done.parent.mkdir(exist_ok=True)
    done.unlink(missing_ok=True)
    try:
        _unpack(images, done.parent / _ROOT)
    except (ImportImageError, ProcessError) as error:
        raise ImageBuildError(f"the images in {output} cannot be unpacked: {error}") from error
    done.write_text(json.dumps(wanted))
    sys.stderr.write(f"unpacked the images in {time.monotonic() - start:.0f} s\n")


def is_unpacked(output: Path) -> bool:
    """Return whether images have been unpacked there, possibly of another build.

    Args:
        output: parent directory of the layout.
    """
    return (output / _FOLDER / _DONE).exists()


def link_unpacked(output: Path, root: Path) -> None:
    """Create the data directory of a new containerd with all unpacked images.

    On the same file system its files are hard links, because containerd never writes to an image's files. Its databases
    are copies.

    Args:
        output: parent directory of the layout.
        root: directory to create in an existing parent.

    Raises:
        ImageBuildError: the other file system has no space for copies.
    """
    source = output / _FOLDER / _ROOT
    is_near = source.stat().st_dev == root.parent.stat().st_dev
    if not is_near:
        require_room(root.parent, _WITH_BLOBS_GB)
    subprocess.run(["cp", "--archive", *(["--link"] if is_near else []), str(source), str(root)], check=True)
    for database in root.glob("*/*.db"):
        copy = database.with_suffix(".copy")
        shutil.copy2(database, copy)
        copy.replace(database)


def _unpack(images: Collection[Image], root: Path) -> None:
    with containerd_for_images(root) as socket:
        for image in images:
            import_image(image, socket=socket)
        replaced = known_images(socket) - {image.reference for image in images}
    if replaced:
        with containerd_for_images(root, collects=True) as socket:
            ctr(socket, "images", "rm", "--sync", *replaced)
