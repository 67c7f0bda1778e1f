"""Models that operators enable while the stack runs, within what its catalogue file allows.

They are rows in Postgres, which every process reads again after a few seconds. The catalogue file decides which rows
count: it allows them at all, lists their accelerators, and its own names win.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, Final

import psycopg
import structlog
from psycopg.types.json import Jsonb

from ray_job.contract.model_fit import misfit
from service.audit.log import Actor, record_action
from service.config_sections import Problem
from service.db import Pool, query
from service.db.rows import fetch_all, fetch_value
from service.errors import CloisterError
from service.model_catalogue import Catalogue, CatalogueFile, CatalogueModel, parse_models
from service.model_registry import RegistryError, read_manifest, remove
from service.ports import ObjectStore

logger = structlog.get_logger(__name__)

REFRESH_INTERVAL_S: Final = 2.0
_EMBEDDINGS: Final = "/v1/embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAtRunTime:
    """A model that an operator enables: its name, the digest of its manifest, its accelerator and engine arguments."""

    id: str
    digest: str
    accelerator: str
    engine_args: Mapping[str, Any]

    def catalogue_model(self, file: CatalogueFile) -> CatalogueModel:
        """Return the model as the service and its jobs use it.

        Raises:
            CloisterError: the catalogue file does not allow it, or it is invalid.
        """
        allowed = file.at_run_time
        if not allowed.allow:
            raise CloisterError(
                "this stack serves the models of its stack file only: add the model there, or set "
                "models_at_run_time.allow: true and deploy"
            )
        if self.id in file.models:
            raise CloisterError(f"the stack file has a model {self.id!r}, whose name wins: choose another name")
        if self.accelerator not in allowed.accelerators:
            raise CloisterError(
                f"models_at_run_time.accelerators allows {', '.join(allowed.accelerators)}, not {self.accelerator!r}"
            )
        raw = asdict(self)
        if self.engine_args.get("runner") == "pooling":
            raw["endpoints"] = [_EMBEDDINGS]
        entries, problems = parse_models([raw], file.accelerators)
        if problems:
            lines = "; ".join(str(Problem(path=each.path[2:], message=each.message)) for each in problems)
            raise CloisterError(f"the model {self.id!r} is invalid: {lines}")
        return entries[0].catalogue_model(file.prices)


class LiveCatalogue(Mapping[str, CatalogueModel]):
    """The models of the catalogue file, and those that operators have enabled. Safe to use from several threads.

    The rows are read at most once in ``REFRESH_INTERVAL_S``, by the thread that needs them. While Postgres does not
    answer, the last ones count.

    Args:
        file: the catalogue file, which allows models at run time.
        pool: connections to Postgres.

    Raises:
        psycopg.OperationalError: on the first use, Postgres cannot be reached. A model must not seem to be gone.
    """

    def __init__(self, file: CatalogueFile, pool: Pool) -> None:
        self._file = file
        self._pool = pool
        self._lock = Lock()
        self._models: Catalogue | None = None
        self._rows: list[ModelAtRunTime] = []
        self._due = 0.0  # in monotonic seconds

    def __getitem__(self, model_id: str) -> CatalogueModel:
        return self._current()[model_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())

    def _current(self) -> Catalogue:
        if self._models is None:
            with self._lock:
                if self._models is None:
                    self._refresh()
        elif time.monotonic() >= self._due and self._lock.acquire(blocking=False):
            # The other threads go on with the last models.
            try:
                self._refresh()
            except psycopg.OperationalError as error:
                logger.warning("models.not_read", error=str(error).strip())
            finally:
                self._due = time.monotonic() + REFRESH_INTERVAL_S
                self._lock.release()
        return self._models or {}

    def _refresh(self) -> None:
        rows = enabled_models(self._pool)
        self._due = time.monotonic() + REFRESH_INTERVAL_S
        if self._models is not None and rows == self._rows:
            return
        models = dict(self._file.models)
        for row in rows:
            try:
                models[row.id] = row.catalogue_model(self._file)
            except CloisterError as error:
                logger.warning("models.not_allowed", model=row.id, reason=str(error))
        logger.info("models.read", models=list(models))
        self._rows, self._models = rows, models


def enabled_models(pool: Pool) -> list[ModelAtRunTime]:
    """Return the models that operators have enabled, the oldest first; the catalogue file may not allow all of them."""
    with pool.connection() as connection:
        return fetch_all(connection, ModelAtRunTime, "models_at_run_time", {})


def enable_model(
    pool: Pool, store: ObjectStore, file: CatalogueFile, model: ModelAtRunTime, *, actor: Actor, force: bool = False
) -> None:
    """Add a model, or change it.

    Args:
        pool: the database.
        store: the object store, which has the model.
        file: the catalogue file.
        model: the model.
        actor: the author, for the audit log.
        force: change it although open batches use it; their further lines are answered by the new one.

    Raises:
        CloisterError: the file does not allow it, it is not in the store or does not fit its accelerator, or open
            batches use another one of this name.
    """
    spec = model.catalogue_model(file).spec
    with pool.connection() as connection:
        connection.execute(query("lock_models_at_run_time"))
        manifest = read_manifest(store, model.digest)
        if reason := misfit(
            file.accelerators[model.accelerator],
            weights_gib=manifest.weights_bytes / 2**30,
            dtype=manifest.dtype,
            quantization=manifest.quantization,
            engine_args=spec.engine_args,
        ):
            raise CloisterError(f"the model {model.id!r} does not fit {model.accelerator}: {reason}")
        present = {row.id: row for row in fetch_all(connection, ModelAtRunTime, "models_at_run_time", {})}
        if present.get(model.id) == model:
            return
        if model.id in present and not force:
            _refuse_open_batches(connection, model.id, "are answered by the new one")
        values = {**asdict(model), "engine_args": Jsonb(dict(model.engine_args))}
        connection.execute(query("enable_model"), values)
        data = {name: value for name, value in asdict(model).items() if name != "id"}
        record_action(connection, "model.enabled", actor=actor, project_id=None, object_id=model.id, data=data)


def disable_model(pool: Pool, model_id: str, *, actor: Actor, force: bool = False) -> None:
    """Remove a model that an operator has enabled. Its files stay.

    Args:
        pool: the database.
        model_id: the name of the model.
        actor: the author, for the audit log.
        force: remove it although open batches use it; they fail with the results so far.

    Raises:
        CloisterError: no such model is enabled, or open batches use it.
    """
    with pool.connection() as connection:
        connection.execute(query("lock_models_at_run_time"))
        if connection.execute(query("disable_model"), {"id": model_id}).rowcount == 0:
            raise CloisterError(
                f"no model {model_id!r} is enabled at run time; `cloister models list` lists those that are. Remove a "
                "model of the stack file there"
            )
        if not force:
            _refuse_open_batches(connection, model_id, "fail with the results so far")
        record_action(connection, "model.disabled", actor=actor, project_id=None, object_id=model_id)


def remove_model(pool: Pool, store: ObjectStore, file: CatalogueFile, digest: str, *, actor: Actor) -> int:
    """Delete a model that nothing uses from the object store.

    Returns:
        The number of deleted objects.

    Raises:
        RegistryError: a model of the catalogue or a job uses it.
        ObjectStoreError: the store cannot be reached; the next call continues.
    """
    users = [f"the model {model.id}" for model in file.models.values() if model.spec.digest == digest]
    with pool.connection() as connection:
        connection.execute(query("lock_models_at_run_time"))
        users += [row["name"] for row in connection.execute(query("users_of_model"), {"digest": digest})]
        if users:
            raise RegistryError(
                f"the model {digest} is in use by {', '.join(users)}: disable it or remove it from the stack file, and "
                "wait for its jobs to end"
            )
        removed = remove(store, digest)
        record_action(connection, "model.deleted", actor=actor, project_id=None, object_id=digest)
    return removed


def _refuse_open_batches(connection: psycopg.Connection[Any], model_id: str, consequence: str) -> None:
    batches = fetch_value(connection, "open_batches_of_model", {"id": model_id})
    if batches:
        raise CloisterError(
            f"{batches} open batch(es) use the model {model_id!r}: wait for them or cancel them, or give --force, and "
            f"their further lines {consequence}"
        )
