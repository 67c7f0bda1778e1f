"""The backends that the API and the reconciler share."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from service.db import Pool
from service.model_catalogue import Catalogue
from service.ports import ObjectStore
from service.workspace import Workspace

DEFAULT_RETENTION_S: Final = 30 * 24 * 3600
DEFAULT_ORPHAN_AGE_S: Final = 24 * 3600
DEFAULT_MAX_TRANSFERS_PER_KEY: Final = 16
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Open connections of a process, and the facts about the stack that go with them.

    ``service.compose`` opens and closes them. ``service.reconciler.backends`` adds the launcher.

    Attributes:
        pool: connections to Postgres.
        store: the object store.
        catalogue: the models that the stack serves.
        catalogue_changed_at: aware UTC time of the last change to the catalogue.
        retention_s: the most seconds for which files and ended batches are kept. A project can set another.
        workspace: the disk for uploads and partial results, and for plans and results of batches.
        max_transfers_per_key: large uploads and partial results that a key may have at a time in this process.
        receipt_key: signs the receipts of deletions. A process that deletes nothing needs no lasting one.
        orphan_age_s: seconds after which an object that belongs to nothing is deleted.
    """

    pool: Pool
    store: ObjectStore
    catalogue: Catalogue = field(default_factory=dict)
    catalogue_changed_at: datetime = _EPOCH
    retention_s: int = DEFAULT_RETENTION_S
    workspace: Workspace = field(default_factory=Workspace)
    max_transfers_per_key: int = DEFAULT_MAX_TRANSFERS_PER_KEY
    receipt_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)
    orphan_age_s: int = DEFAULT_ORPHAN_AGE_S
