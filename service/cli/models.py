"""``cloister models``: push models to the object store, verify and remove them, and enable them at run time."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Annotated, Final

import typer

from ray_job.contract.model_manifest import DIGEST, ModelManifest
from service.cli.database import Operator, operator_actor, stack_database
from service.cli.options import DEFAULT_DATA_DIR, DataDir
from service.client.terminal import counted, note, transfer
from service.errors import CloisterError
from service.model_catalogue import CatalogueFile, load_catalogue_file
from service.model_directory import describe, find_files
from service.model_registry import find_model, list_models, push, verify
from service.models_at_run_time import ModelAtRunTime, disable_model, enable_model, enabled_models, remove_model
from service.ports import ObjectStore
from service.settings import parse_object_store_url

models = typer.Typer(help="Push models to the object store of a stack, and enable them.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The name or the digest of a pushed model.")]
Force = Annotated[bool, typer.Option("--force", help="Do it although open batches use the model.")]

_MAX_NAME_LENGTH: Final = 128
# Ids of licences and the operators between them: https://spdx.github.io/spdx-spec/v2.3/SPDX-license-expressions/
_SPDX: Final = re.compile(r"[A-Za-z0-9(][A-Za-z0-9.+:() -]{0,199}")


@models.command("push")
def push_model(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of the model: config.json, tokenizer, *.safetensors.")
    ],
    *,
    name: Annotated[str, typer.Option(help="A name for the model. Default: that of the directory.")] = "",
    spdx: Annotated[
        str, typer.Option("--license", metavar="SPDX", help="The licence of the model, e.g. Apache-2.0.")
    ] = "",
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Accept *.bin, *.pt and the like, which can run code when loaded.")
    ] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Store a model in the object store and print its digest. Run it again to finish an interrupted push."""
    name = name or directory.resolve().name
    if not name.isprintable() or len(name) > _MAX_NAME_LENGTH or DIGEST.fullmatch(name):
        raise typer.BadParameter(f"give 1 to {_MAX_NAME_LENGTH} printable characters", param_hint="--name")
    if spdx and not _SPDX.fullmatch(spdx):
        raise typer.BadParameter(f"{spdx!r} is not an SPDX expression, e.g. Apache-2.0", param_hint="--license")
    store = stack_object_store(data_dir)
    files = find_files(directory, allow_pickle=allow_pickle)
    total_bytes = sum(file.stat().st_size for file in files.values())
    with _progress("hashing", total_bytes, len(files)) as report:
        manifest = describe(files, name=name, spdx=spdx, report=report)
    with _progress("sending", total_bytes, len(files)) as report:
        sent = push(store, manifest, files, report=report)
    note(f"sent {counted(sent, 'file')}; {len(files) - sent} were in the object store")
    print(manifest.digest)


@models.command("list")
def show_models(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """List the pushed models: name, digest, size, parameters, data type and licence; then those enabled at run time."""
    for model in list_models(stack_object_store(data_dir)):
        manifest = model.manifest
        if manifest is None:
            print(f"-  {model.digest}  {model.problem}")
            continue
        print(
            f"{manifest.name}  {model.digest}  {_gib(manifest.total_bytes)}  {manifest.parameters:,} parameters  "
            f"{manifest.quantization or manifest.dtype or '-'}  {manifest.license or '-'}"
        )
    if os.environ.get("CLOISTER_OBJECT_STORE") and not os.environ.get("CLOISTER_DATABASE_URL"):
        return  # the store of a cluster, from outside of it
    with stack_database(data_dir) as pool:
        for enabled in enabled_models(pool):
            print(f"enabled  {enabled.id}  {enabled.digest}  {enabled.accelerator}  {dict(enabled.engine_args)}")


@models.command("show")
def show_model(model: Model, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show what a pushed model is, and its files."""
    manifest = _manifest(stack_object_store(data_dir), model)
    for label, value in (
        ("name", manifest.name),
        ("digest", manifest.digest),
        ("licence", manifest.license),
        ("architecture", manifest.architecture),
        ("data type", manifest.dtype),
        ("quantization", manifest.quantization),
        ("parameters", f"{manifest.parameters:,}"),
        ("weights", _gib(manifest.weights_bytes)),
        ("tokenizer class", manifest.tokenizer_class),
        ("chat template", manifest.chat_template),
        ("accelerators", ", ".join(manifest.accelerators)),
        ("all files", _gib(manifest.total_bytes)),
    ):
        print(f"{label:<15}  {value or '-'}")
    for file in manifest.files:
        print(f"{file.sha256}  {file.size_bytes:>15,}  {file.path}")


@models.command("verify")
def verify_models(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The name or the digest of a pushed model. Default: all.")
    ] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Read every file of a model in the object store and check its digest. The exit status is 1 if one is wrong."""
    store, problems = stack_object_store(data_dir), 0
    for stored in [find_model(store, model)] if model else list_models(store):
        found = [stored.problem]
        if manifest := stored.manifest:
            with _progress("reading", manifest.total_bytes, len(manifest.files)) as report:
                found = list(verify(store, manifest, report=report))
        problems += len(found)
        print(f"{stored.digest}  {counted(len(found), 'problem') if found else 'unchanged'}", flush=True)
        for problem in found:
            print(f"  {problem}")
    if problems:
        raise CloisterError(
            f"{counted(problems, 'problem')}: delete the model with `cloister models rm`, push it again"
        )


@models.command("rm")
def remove_pushed_model(model: Model, *, operator: Operator = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Delete a model from the object store, unless the catalogue or a job uses it."""
    store = stack_object_store(data_dir)
    digest = find_model(store, model).digest
    with stack_database(data_dir) as pool:
        removed = remove_model(pool, store, stack_catalogue(data_dir), digest, actor=operator_actor(operator))
    print(f"deleted {digest}, {counted(removed, 'object')}")


@models.command("enable")
def enable(
    name: Annotated[str, typer.Argument(help="The name that requests use.")],
    *,
    digest: Annotated[str, typer.Option(help="The digest of a pushed model.")],
    accelerator: Annotated[str, typer.Option(help="What its engines run on; models_at_run_time lists the choice.")],
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="An engine argument of vLLM as key=value, e.g. max_model_len=4096. May be repeated."),
    ] = None,
    force: Force = False,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Add a model to the running stack, or change one that was added. It is offered within seconds.

    The stack file must allow it: `models_at_run_time`. With --force, open batches go on with the new model.
    """
    from service.local.models import parse_engine_args

    model = ModelAtRunTime(
        id=name, digest=digest, accelerator=accelerator, engine_args=parse_engine_args(engine_arg or ())
    )
    store, file = stack_object_store(data_dir), stack_catalogue(data_dir)
    with stack_database(data_dir) as pool:
        enable_model(pool, store, file, model, actor=operator_actor(operator), force=force)
    print(f"enabled {name}")


@models.command("disable")
def disable(
    name: Annotated[str, typer.Argument(help="The name that requests use.")],
    *,
    force: Force = False,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Remove a model that was enabled. Its files stay. With --force, its open batches fail with the results so far."""
    with stack_database(data_dir) as pool:
        disable_model(pool, name, actor=operator_actor(operator), force=force)
    print(f"disabled {name}")


def stack_object_store(data_dir: Path) -> ObjectStore:
    """Open the object store that CLOISTER_OBJECT_STORE names, or else that of ``cloister local``.

    Raises:
        CloisterError: neither is present.
    """
    from service.adapters.open_object_store import open_object_store
    from service.local.layout import layout_of

    url, objects = os.environ.get("CLOISTER_OBJECT_STORE"), layout_of(data_dir).objects
    if not url and (os.environ.get("CLOISTER_DATABASE_URL") or not objects.is_dir()):
        raise CloisterError(
            f"no object store: start `cloister local --data-dir {data_dir}` first, or set CLOISTER_OBJECT_STORE to the "
            "URL of the stack's store, e.g. s3://bucket/prefix"
        )
    try:
        return open_object_store(parse_object_store_url(url or objects.as_uri()))
    except ValueError as error:
        raise CloisterError(f"CLOISTER_OBJECT_STORE: {error}") from error


def stack_catalogue(data_dir: Path) -> CatalogueFile:
    """Read the catalogue that CLOISTER_MODELS names, or else that of ``cloister local``.

    Raises:
        SettingsError: it cannot be read.
    """
    from service.local.layout import layout_of

    return load_catalogue_file(os.environ.get("CLOISTER_MODELS") or layout_of(data_dir).models_file)


def _manifest(store: ObjectStore, model: str) -> ModelManifest:
    stored = find_model(store, model)
    if stored.manifest is None:
        raise CloisterError(f"the model {stored.digest} has no valid manifest: {stored.problem}")
    return stored.manifest


@contextmanager
def _progress(doing: str, total_bytes: int, files: int) -> Iterator[Callable[[int], None]]:
    """Show on stderr how much of a model is done; yield a function that takes further bytes, from any thread."""
    note(f"{doing} {counted(files, 'file')}, {_gib(total_bytes)}")
    done, lock = 0, Lock()
    with transfer(doing, total_bytes) as show:

        def add(size_bytes: int) -> None:
            nonlocal done
            with lock:
                done += size_bytes
                show(done)

        yield add


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.2f} GiB"
