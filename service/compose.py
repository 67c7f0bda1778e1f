"""Opens what the settings name. The one place that knows which adapters there are."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from service.adapters.open_object_store import open_object_store
from service.db import Pool, open_pool
from service.model_catalogue import Catalogue, load_catalogue
from service.ports import ObjectStore
from service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """What the API and the reconciler share. ``catalogue_changed_at`` is aware UTC."""

    pool: Pool
    store: ObjectStore
    catalogue: Catalogue
    catalogue_changed_at: datetime


@contextlib.contextmanager
def open_backends(settings: Settings, *, max_connections: int = 10) -> Iterator[Backends]:
    """Opens the database, the object store and the model catalogue, and closes them at the end.

    Neither the database nor S3 needs to answer yet.

    Raises:
        SettingsError: the model catalogue is wrong.
        ObjectStoreError: the directory of the object store cannot be made.
    """
    catalogue = load_catalogue(settings.models_path)
    changed_at = datetime.fromtimestamp(settings.models_path.stat().st_mtime, UTC)
    store = open_object_store(settings.object_store)
    with open_pool(settings.database_url, max_size=max_connections) as pool:
        yield Backends(pool=pool, store=store, catalogue=catalogue, catalogue_changed_at=changed_at)
