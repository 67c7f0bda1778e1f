"""Reads the directory of a model in Hugging Face's layout, and describes it for its manifest."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ray_job.contract.accelerators import ACCELERATORS
from ray_job.contract.model_fit import misfit
from ray_job.contract.model_manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    ModelFile,
    ModelManifest,
    is_model_path,
)
from service.errors import CloisterError

CHUNK_BYTES: Final = 1 << 20
THREADS: Final = 4
"""Files that are read at the same time."""
MAX_FILES: Final = 5_000
MAX_FILE_BYTES: Final = 150 << 30
"""The S3 adapter writes objects of at most 10,000 parts of 16 MiB."""
MAX_PATH_LENGTH: Final = 512
PICKLED: Final = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")
"""Endings of files that may be pickled. Unpickling runs code that the file chooses."""
_MAX_JSON_BYTES: Final = 64 << 20
# The limit of the safetensors library: MAX_HEADER_SIZE in https://github.com/huggingface/safetensors.
_MAX_HEADER_BYTES: Final = 100_000_000
_INDEX: Final = "model.safetensors.index.json"
# Data types of safetensors by vLLM's names. Weights in other types are quantized.
_DTYPES: Final = MappingProxyType({"F16": "float16", "BF16": "bfloat16", "F32": "float32"})
_LENGTH_BYTES: Final = 8


class ModelDirectoryError(CloisterError):
    """A directory cannot be pushed as a model. The message names the file and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Contents of the safetensors files of a model: numbers, bytes of the files, and the type of most numbers."""

    parameters: int
    size_bytes: int
    dtype: str


def find_files(directory: Path, *, allow_pickle: bool = False) -> dict[str, Path]:
    """Return the files of a model by their path below its directory, in order, without names that start with a dot.

    Args:
        directory: the directory.
        allow_pickle: accept files that may be pickled.

    Raises:
        ModelDirectoryError: the directory has no config.json, or a file that a model may not have.
    """
    root = directory.resolve()
    if not (root / "config.json").is_file():
        raise ModelDirectoryError(f"{directory} has no config.json: give the directory of a model")
    files = dict(sorted(_walk(root)))
    for path, file in files.items():
        if problem := _file_problem(path, file, root, allow_pickle=allow_pickle):
            raise ModelDirectoryError(f"{directory / path}: {problem}")
    if len(files) > MAX_FILES:
        raise ModelDirectoryError(f"{directory} has {len(files):,} files, and a model may have {MAX_FILES:,}")
    return {path: file.resolve() for path, file in files.items()}


def describe(
    files: Mapping[str, Path], *, name: str, spdx: str = "", report: Callable[[int], None] = lambda _bytes: None
) -> ModelManifest:
    """Hash the files of a model and return its manifest.

    Args:
        files: see ``find_files``.
        name: the name of the model.
        spdx: its licence, an SPDX expression.
        report: receives the number of bytes of each chunk that was hashed.

    Raises:
        ModelDirectoryError: a file cannot be read, or the model has no safetensors or an invalid configuration.
    """
    config, tokenizer = (_read_json(files, each) for each in ("config.json", "tokenizer_config.json"))
    weights = _read_weights(files)
    quantization = str(_mapping(config.get("quantization_config")).get("quant_method") or "")
    dtype = weights.dtype or str(config.get("torch_dtype") or config.get("dtype") or "")
    architectures = config.get("architectures")
    template = "tokenizer_config.json" if tokenizer.get("chat_template") else ""
    template = "chat_template.jinja" if "chat_template.jinja" in files else template

    def hashed(item: tuple[str, Path]) -> ModelFile:
        digest, size_bytes = hashlib.sha256(), 0
        for chunk in read_chunks(item[1]):
            digest.update(chunk)
            size_bytes += len(chunk)
            report(len(chunk))
        return ModelFile(path=item[0], size_bytes=size_bytes, sha256=digest.hexdigest())

    with ThreadPoolExecutor(THREADS) as executor:
        entries = tuple(executor.map(hashed, files.items()))
    weights_gib = weights.size_bytes / 2**30
    manifest = ModelManifest(
        name=name,
        license=spdx,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        dtype=dtype,
        quantization=quantization,
        parameters=weights.parameters,
        weights_bytes=weights.size_bytes,
        tokenizer_class=str(tokenizer.get("tokenizer_class") or ""),
        chat_template=template,
        accelerators=tuple(
            row.name
            for row in ACCELERATORS.values()
            if not misfit(row, weights_gib=weights_gib, dtype=dtype, quantization=quantization)
        ),
        files=entries,
    )
    if len(manifest.to_json()) > MAX_MANIFEST_BYTES:
        raise ModelDirectoryError(
            f"the manifest of {name} is larger than {MAX_MANIFEST_BYTES:,} bytes: push fewer files"
        )
    return manifest


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in chunks of ``CHUNK_BYTES``.

    Raises:
        ModelDirectoryError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ModelDirectoryError(f"cannot read {path}: {error.strerror}") from error


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    for parent, directories, names in os.walk(root):
        directories[:] = [name for name in directories if not name.startswith(".")]
        # A link to a directory is no directory to descend into, and cannot be an object either.
        links = [name for name in directories if Path(parent, name).is_symlink()]
        for name in (*names, *links):
            if not name.startswith("."):
                path = Path(parent, name)
                yield path.relative_to(root).as_posix(), path


def _file_problem(path: str, file: Path, root: Path, *, allow_pickle: bool) -> str:
    """Return why a file cannot be pushed; empty if it can."""
    if not file.resolve().is_relative_to(root):
        return "is a symbolic link out of the directory; copy the model with `cp -rL` first"
    if not file.is_file():
        return "is no regular file; remove it, or replace a link by what it names"
    if path == MANIFEST_NAME:
        return "has the name of the manifest that the object store adds; remove or rename it"
    if not is_model_path(path) or len(path) > MAX_PATH_LENGTH:
        return f"has a name that no object can have: use at most {MAX_PATH_LENGTH} printable characters"
    if file.stat().st_size > MAX_FILE_BYTES:
        return f"is larger than {MAX_FILE_BYTES >> 30} GiB; save the model in smaller shards"
    if path.lower().endswith(PICKLED) and not allow_pickle:
        return (
            "may be pickled, and loading it would run code that it chooses; remove it if there are *.safetensors, "
            "convert it, or give --allow-pickle if you trust its author"
        )
    return ""


def _read_weights(files: Mapping[str, Path]) -> _Weights:
    index = _mapping(_read_json(files, _INDEX).get("weight_map")).values()
    shards = {str(name) for name in index} or {
        name for name in files if name.endswith(".safetensors") and "/" not in name
    }
    if missing := sorted(shards - files.keys()):
        raise ModelDirectoryError(f"{_INDEX} names {missing[0]}, which is missing: download the whole model")
    by_type: Counter[str] = Counter()
    parameters = size_bytes = 0
    for name in sorted(shards):
        size_bytes += files[name].stat().st_size
        for tensor in _header(files[name]).values():
            numbers = math.prod(tensor["shape"])
            parameters += numbers
            by_type[tensor["dtype"]] += numbers
    stored = by_type.most_common(1)[0][0] if by_type else ""
    return _Weights(parameters=parameters, size_bytes=size_bytes, dtype=_DTYPES.get(stored, ""))


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors of a safetensors file by name: ``dtype``, ``shape`` and ``data_offsets``.

    The file starts with the size of the header, 8 bytes in little endian, and the header in JSON.
    Source: https://huggingface.co/docs/safetensors/index#format
    """
    problem = ModelDirectoryError(f"{file} is no complete safetensors file: download it again")
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 0 < size <= _MAX_HEADER_BYTES:
                raise problem
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        ends = [int(tensor["data_offsets"][1]) for tensor in header.values()]
        shapes_are_valid = all(
            isinstance(tensor["dtype"], str) and all(isinstance(number, int) for number in tensor["shape"])
            for tensor in header.values()
        )
    except OSError as error:
        raise ModelDirectoryError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise problem from error
    if not shapes_are_valid or file.stat().st_size != _LENGTH_BYTES + size + max(ends, default=0):
        raise problem
    return dict(header)


def _read_json(files: Mapping[str, Path], name: str) -> Mapping[str, Any]:
    """Return a JSON object of the model; empty if it has no such file."""
    file = files.get(name)
    if file is None:
        return {}
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise ModelDirectoryError(f"{file} is larger than {_MAX_JSON_BYTES >> 20} MiB, which no configuration is")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelDirectoryError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelDirectoryError(f"{file} is not JSON: download it again") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{file} is not a JSON object: download it again")
    return content


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
