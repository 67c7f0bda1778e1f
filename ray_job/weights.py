"""``python -m ray_job.weights``: copies a model's directory from the object store, before the pod's own work begins.

A store that has no such model is nothing that a new pod would change: the pod goes on with a note in place of the
model, and the job ends with it, so that the batch's errors say it.
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ray_job.contract.weights import WEIGHTS_VARIABLE, MissingModelError, WeightsCopy, WeightsError
from ray_job.errors import EngineStartError
from ray_job.object_store import open_file_system

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

CHUNK_BYTES: Final = 16 << 20
# Four files at once fill a network of 10 Gbit/s; more would only need more memory.
THREADS: Final = 4
_NOTE: Final = "no-model.txt"
_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def copy_model(copy: WeightsCopy) -> int:
    """Copies what belongs to the model and returns how many bytes. Files that are there in full are left alone.

    Raises:
        MissingModelError: there are no such objects, or no configuration of a model among them.
    """
    from pyarrow.fs import FileSelector, FileType

    file_system, base = open_file_system(copy.object_store)
    root = f"{base}/{copy.prefix.strip('/')}"
    found = file_system.get_file_info(FileSelector(root, allow_not_found=True, recursive=True))
    files = {info.path.removeprefix(f"{root}/"): info for info in found if info.type == FileType.File}
    if "config.json" not in files:
        raise MissingModelError(
            f"{root}/ in the object store holds no config.json: upload the model's whole directory there, or correct "
            "the model's source or model_weights.prefix"
        )
    wanted = {name: info for name, info in files.items() if copy.whole or not name.endswith(_WEIGHT_FILES)}
    with ThreadPoolExecutor(THREADS) as executor:
        futures = [
            executor.submit(_copy_file, file_system, info, Path(copy.directory) / name) for name, info in wanted.items()
        ]
        for future in futures:
            future.result()
    return sum(info.size for info in wanted.values())


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
        EngineStartError: it is there, and is the message.
    """
    note = Path(source) / _NOTE
    if note.is_file():
        raise EngineStartError(note.read_text())


def prepare(copy: WeightsCopy) -> str:
    """Copies the model, or leaves the note; returns what there is to tell.

    Raises:
        OSError: the object store cannot be reached, or the disk is full.
    """
    try:
        return f"copied {copy_model(copy) / 2**30:.1f} GiB"
    except MissingModelError as error:
        directory = Path(copy.directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _NOTE).write_text(str(error))
        return str(error)


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
