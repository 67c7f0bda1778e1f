"""``python -m ray_job.weights``: copies a model's directory from the object store, before the pod's own work begins.

A container that fails has its pod made anew, for as long as the batch may run, and nobody is told. So the pod goes on
with a note in place of the model, and the job ends with it: the batch's errors say it.
"""

import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ray_job.contract.weights import WEIGHTS_VARIABLE, WeightsCopy, WeightsError
from ray_job.errors import EngineStartError, NoModelError
from ray_job.object_store import open_file_system

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

CHUNK_BYTES: Final = 16 << 20
# Four files at once fill a network of 10 Gbit/s; more would only need more memory.
THREADS: Final = 4
PAUSES_S: Final = (5, 20)
"""Between the tries of a copy; a GPU waits for it."""
_NO_MODEL: Final = "no-model.txt"
_NOT_COPIED: Final = "model-not-copied.txt"
_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data")
# Beside *.safetensors these are the same weights once more. A *.pt may be a layer of its own.
_SECOND_FORMATS: Final = (".bin", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data")
# Folders in which models that are published have the same weights for other programs.
_FOR_OTHER_PROGRAMS: Final = ("original/", "metal/", "onnx/", "openvino/")
# A file takes whole blocks of a volume.
_BLOCK_BYTES: Final = 4096


def copy_model(copy: WeightsCopy) -> int:
    """Copies what belongs to the model and returns how many bytes. Files that are there in full are left alone.

    Raises:
        NoModelError: there are no such objects, no configuration of a model among them, or more than the volume holds.
        OSError: the object store cannot be reached or refuses, or the node's disk is full.
    """
    from pyarrow.fs import FileSelector, FileType

    file_system, base = open_file_system(copy.object_store)
    root = f"{base}/{copy.prefix.strip('/')}"
    found = file_system.get_file_info(FileSelector(root, allow_not_found=True, recursive=True))
    files = {info.path.removeprefix(f"{root}/"): info for info in found if info.type == FileType.File}
    if "config.json" not in files:
        raise NoModelError(
            f"{root}/ in the object store holds no config.json: upload the model's whole directory there, or correct "
            "the model's source or model_weights.prefix"
        )
    loaded = {name: files[name] for name in (loaded_files(files) if copy.load_format == "auto" else files)}
    _check_room(
        f"what an engine loads of {root}/ in the object store",
        loaded.values(),
        copy.engine_volume_gib,
        "raise the model's weights_gib (model_weights.cache_gib where it has none) or delete what is not of the model",
    )
    wanted = {name: info for name, info in loaded.items() if copy.whole or not name.endswith(_WEIGHT_FILES)}
    _check_room(
        f"what is not weights of {root}/ in the object store",
        wanted.values(),
        copy.volume_gib,
        "delete what is not of the model",
    )
    with ThreadPoolExecutor(THREADS) as executor:
        futures = [
            executor.submit(_copy_file, file_system, info, Path(copy.directory) / name) for name, info in wanted.items()
        ]
        for future in futures:
            future.result()
    return sum(info.size for info in wanted.values())


def loaded_files(names: Collection[str]) -> set[str]:
    """Those of a model's files that vLLM needs by default: of weights in several formats ``*.safetensors`` alone.

    Source: vLLM's default loader, which takes the ``*.safetensors`` of the directory itself before anything else.
    """
    folders = {PurePosixPath(name).parent for name in names if name.endswith(".safetensors")}
    if PurePosixPath() not in folders:
        return set(names)
    return {
        name
        for name in names
        if not (name.startswith(_FOR_OTHER_PROGRAMS) and name.endswith(_WEIGHT_FILES))
        and not (name.endswith(_SECOND_FORMATS) and PurePosixPath(name).parent in folders)
    }


def _check_room(what: str, files: "Iterable[FileInfo]", volume_gib: int, remedy: str) -> None:
    needed_gib = sum(info.size + _BLOCK_BYTES for info in files) / 2**30
    if needed_gib > volume_gib:  # Kubernetes would end the pod in the middle of the copy
        raise NoModelError(f"{what} takes {needed_gib:.2f} GiB, and the volume for it holds {volume_gib} GiB: {remedy}")


def _copy_file(file_system: "FileSystem", source: "FileInfo", target: Path) -> None:
    if target.is_file() and target.stat().st_size == source.size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    with file_system.open_input_stream(source.path) as stream, partial.open("wb") as file:
        shutil.copyfileobj(stream, file, CHUNK_BYTES)
    partial.rename(target)


def require_model(source: str) -> None:
    """Looks for the note that stands in place of a model.

    Raises:
        NoModelError: it is there, and another attempt would find it too.
        EngineStartError: it is there, and another attempt may have better luck.
    """
    for name, error in ((_NO_MODEL, NoModelError), (_NOT_COPIED, EngineStartError)):
        note = Path(source) / name
        if note.is_file():
            raise error(note.read_text())


def prepare(copy: WeightsCopy, pauses_s: Iterable[float] = PAUSES_S) -> str:
    """Copies the model, or leaves the note; returns what there is to tell.

    Args:
        copy: what to copy.
        pauses_s: how long to wait before each further try, in seconds.

    Raises:
        OSError: not even the note can be written.
    """
    directory = Path(copy.directory)
    for name in (_NO_MODEL, _NOT_COPIED):
        (directory / name).unlink(missing_ok=True)
    try:
        return f"copied {_copy_patiently(copy, pauses_s) / 2**30:.1f} GiB"
    except NoModelError as error:
        return _leave_note(directory, _NO_MODEL, str(error))
    except OSError as error:
        return _leave_note(
            directory,
            _NOT_COPIED,
            f"the model could not be copied to {directory}: {' '.join(str(error).split())}; see that the object store "
            "answers, that the key of jobs may list and read there, and that the node's disk is not full",
        )


def _copy_patiently(copy: WeightsCopy, pauses_s: Iterable[float]) -> int:
    for pause_s in pauses_s:
        try:
            return copy_model(copy)
        except OSError as error:
            sys.stderr.write(f"{error}; trying again in {pause_s} s\n")
            time.sleep(pause_s)
    return copy_model(copy)


def _leave_note(directory: Path, name: str, text: str) -> str:
    shutil.rmtree(directory, ignore_errors=True)  # half a model is none, and may be what has filled the disk
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(text)
    return text


def main() -> int:
    """Prepares what the environment names; returns the exit status."""
    try:
        told = prepare(WeightsCopy.from_json(os.environ.get(WEIGHTS_VARIABLE, "")))
    except (WeightsError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
