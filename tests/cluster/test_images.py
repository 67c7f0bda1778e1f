"""Content of the cluster's images, read from their files, and their import into containerd."""

import hashlib
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.cluster.images.build import built_images
from tests.cluster.images.buildah import ImageBuildError, require_programs, require_room
from tests.cluster.images.containerd import containerd_for_images
from tests.cluster.images.image import Image, images_in, remove_replaced_images
from tests.cluster.images.importing import ctr, import_image, known_images
from tests.cluster.images.marks import Marks, fingerprint
from tests.cluster.images.unpacking import link_unpacked, unpack

pytestmark = pytest.mark.cluster

IMAGES = ("service", "ray-cpu")
COMPILERS = {f"usr/bin/{name}" for name in ("cc", "c++", "gcc", "g++", "clang")}
INSTALLERS = re.compile(r"^opt/uv|^root/\.cache/uv/|^src/|/bin/(uvx?|pip[\d.]*)$|site-packages/pip/")
LABELS = ("title", "description", "licenses", "version", "revision", "created", "base.name")


@cache
def names_in(layer: Path) -> frozenset[str]:
    with tarfile.open(layer) as archive:
        return frozenset(name.removeprefix("./") for name in archive.getnames())


def layers(image: Image) -> list[Path]:
    return [image.blob(layer["digest"]) for layer in image.manifest()["layers"]]


def paths(image: Image) -> set[str]:
    return {name for layer in layers(image) for name in names_in(layer)}


@pytest.mark.parametrize("name", IMAGES)
def test_reference_is_the_manifest_digest_and_every_blob_exists(images: Mapping[str, Image], name: str) -> None:
    image = images[name]
    parts = [image.manifest()["config"], *image.manifest()["layers"]]

    manifest = image.blob(image.digest).read_bytes()
    assert image.reference == f"localhost/cloister/{name}@sha256:{hashlib.sha256(manifest).hexdigest()}"
    assert [image.blob(part["digest"]).stat().st_size for part in parts] == [part["size"] for part in parts]


@pytest.mark.parametrize("name", IMAGES)
def test_image_runs_as_a_numeric_user_other_than_root(images: Mapping[str, Image], name: str) -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", images[name].configuration()["config"]["User"])


@pytest.mark.parametrize("name", IMAGES)
def test_no_image_has_a_compiler(images: Mapping[str, Image], name: str) -> None:
    assert not COMPILERS & paths(images[name])


@pytest.mark.parametrize("name", IMAGES)
def test_project_image_has_its_packages_and_no_installer(images: Mapping[str, Image], name: str) -> None:
    found = paths(images[name])

    assert "opt/cloister/bin/python" in found
    assert not [path for path in found if INSTALLERS.search(path)]


@pytest.mark.parametrize("name", IMAGES)
def test_project_image_has_labels_with_its_origin(images: Mapping[str, Image], name: str) -> None:
    labels = images[name].configuration()["config"]["Labels"]

    origin = {label: labels[f"org.opencontainers.image.{label}"] for label in LABELS}
    assert not {"", "unknown"} & set(origin.values())
    assert "@sha256:" in origin["base.name"]


@pytest.mark.parametrize(("name", "module"), [("service", "service/api/__main__"), ("ray-cpu", "ray_job/__main__")])
def test_code_is_a_small_layer_on_top_of_the_packages(images: Mapping[str, Image], name: str, module: str) -> None:
    *_, packages, sources = layers(images[name])
    path = f"opt/cloister/lib/python3.11/site-packages/{module}.py"

    assert path in names_in(sources)
    assert path not in names_in(packages)
    assert sources.stat().st_size < 10_000_000 < packages.stat().st_size


def test_code_is_compiled(images: Mapping[str, Image]) -> None:
    found = paths(images["ray-cpu"])

    sources = [Path(path) for path in found if re.search(r"site-packages/(ray_job|ray|vllm)/\w+\.py$", path)]
    assert sources
    assert {f"{path.parent}/__pycache__/{path.stem}.cpython-311.pyc" for path in sources} <= found


@pytest.fixture
def near(images: Mapping[str, Image]) -> Iterator[Path]:
    """Directory on the file system of the images, where their files can be linked."""
    with tempfile.TemporaryDirectory(dir=images["pause"].layout.parent, prefix="containerd-") as directory:
        yield Path(directory)


@pytest.fixture
def containerd(near: Path) -> Iterator[Path]:
    """Socket of a containerd with its data on that file system."""
    with containerd_for_images(near) as socket:
        yield socket


def test_imported_image_is_found_by_its_digest(containerd: Path, images: Mapping[str, Image]) -> None:
    for _ in range(2):
        import_image(images["versitygw"], socket=containerd)

    assert known_images(containerd) == {images["versitygw"].reference}


def test_imported_image_is_linked_instead_of_copied(containerd: Path, near: Path, images: Mapping[str, Image]) -> None:
    import_image(images["pause"], socket=containerd)

    store = near / "io.containerd.content.v1.content/blobs"
    for digest, path in images["pause"].blobs().items():
        assert (store / digest.replace(":", "/")).samefile(path)


def test_image_is_copied_to_another_file_system(images: Mapping[str, Image]) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="containerd-") as directory,
        containerd_for_images(Path(directory)) as socket,
    ):
        import_image(images["pause"], socket=socket)

        assert known_images(socket) == {images["pause"].reference}


def test_unpacked_images_are_linked_for_each_containerd(near: Path, images: Mapping[str, Image]) -> None:
    unpack([images["pause"], images["coredns"]], near)
    before = (near / "unpacked").stat().st_mtime_ns
    unpack([images["coredns"], images["pause"]], near)
    assert (near / "unpacked").stat().st_mtime_ns == before

    source = near / "unpacked/containerd"
    for name in ("first", "second"):
        link_unpacked(near, near / name)
        with containerd_for_images(near / name) as socket:
            assert known_images(socket) == {images["pause"].reference, images["coredns"].reference}
            assert ctr(socket, "images", "check", "--quiet").split() == sorted(known_images(socket))
    program = next(source.rglob("coredns"))
    assert program.samefile(near / "first" / program.relative_to(source))
    databases = list(source.glob("*/*.db"))
    assert databases
    assert not any(path.samefile(near / "first" / path.relative_to(source)) for path in databases)


def test_partly_unpacked_images_are_unpacked_again(near: Path, images: Mapping[str, Image]) -> None:
    unpack([images["pause"]], near)
    (near / "unpacked/references.json").unlink()
    in_part = near / "unpacked/containerd/in-part"
    in_part.touch()
    unpack([images["pause"]], near)
    assert not in_part.exists()
    with containerd_for_images(near / "unpacked/containerd") as socket:
        assert ctr(socket, "images", "check", "--quiet").split() == [images["pause"].reference]


def test_replaced_image_is_removed_from_the_unpacked_images(near: Path, images: Mapping[str, Image]) -> None:
    unpack([images["pause"], images["coredns"]], near)
    assert list((near / "unpacked").rglob("coredns"))
    unpack([images["pause"]], near)
    assert not list((near / "unpacked").rglob("coredns"))


def test_fingerprint_depends_on_texts_files_and_names_but_not_on_bytecode(tmp_path: Path) -> None:
    (tmp_path / "sources/__pycache__").mkdir(parents=True)
    file = tmp_path / "sources/a.py"
    file.write_text("1")
    first = fingerprint("text", tmp_path / "sources")

    (tmp_path / "sources/__pycache__/a.pyc").write_text("compiled")
    assert fingerprint("text", tmp_path / "sources") == first
    assert fingerprint("another", tmp_path / "sources") != first
    file.write_text("2")
    assert fingerprint("text", tmp_path / "sources") != first
    file.write_text("1")
    file.rename(tmp_path / "sources/b.py")
    assert fingerprint("text", tmp_path / "sources") != first


def test_missing_or_changed_image_is_built_again(tmp_path: Path) -> None:
    marks, built = Marks(tmp_path / "built"), list[str]()

    marks.build("a", "one", lambda: built.append("first"), there=False)
    marks.build("a", "one", lambda: built.append("unneeded"), there=True)
    marks.build("a", "one", lambda: built.append("gone"), there=False)
    marks.build("a", "two", lambda: built.append("changed"), there=True)

    assert built == ["first", "gone", "changed"]


def test_image_is_built_again_after_a_failed_build(tmp_path: Path) -> None:
    marks, built = Marks(tmp_path / "built"), list[str]()

    with pytest.raises(ZeroDivisionError):
        marks.build("a", "one", lambda: built.append(str(1 / 0)), there=True)
    marks.build("a", "one", lambda: built.append("again"), there=True)

    assert built == ["again"]


def test_blobs_of_replaced_images_are_removed(images: Mapping[str, Image], tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    pause = images["pause"]
    (layout / "blobs/sha256").mkdir(parents=True)
    entry = (
        f'{{"digest":"{pause.digest}","annotations":{{"org.opencontainers.image.ref.name":"localhost/cloister/a"}}}}'
    )
    (layout / "index.json").write_text(f'{{"manifests":[{{"digest":"sha256:old"}},{entry}]}}')
    for digest, path in pause.blobs().items():
        (layout / "blobs" / digest.replace(":", "/")).write_bytes(path.read_bytes())
    (layout / "blobs/sha256/old").write_text("of before")

    remove_replaced_images(layout)

    assert {path.name for path in layout.glob("blobs/sha256/*")} == {path.name for path in pause.blobs().values()}
    assert images_in(layout)["a"].digest == pause.digest


def test_missing_build_program_is_named(
    images: Mapping[str, Image], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del images  # on a machine that has built images, the tools that this test hides exist
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ImageBuildError, match="apt-get install buildah containerd debootstrap"):
        require_programs()


def test_full_disk_is_reported_before_a_build(tmp_path: Path) -> None:
    with pytest.raises(ImageBuildError, match=r"1000000 GB must be free at .*, and [0-9]+ GB are"):
        require_room(tmp_path, 1_000_000)


def test_missing_images_are_named_with_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(ImageBuildError, match=r"pause, .*ray-cpu is in .*: python -m tests.cluster.images.build"):
        built_images(tmp_path)
