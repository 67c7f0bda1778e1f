"""The backends that the API and the reconciler share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network, IPv6Network
from typing import TYPE_CHECKING, Any, Final

from cryptography.fernet import MultiFernet
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import Counter
from psycopg.types.json import Jsonb

from service.db import Pool
from service.model_catalogue import Catalogue
from service.ports import ObjectStore
from service.traces import Traces
from service.workspace import Workspace

if TYPE_CHECKING:
    from service.oidc.tokens import Issuer

DEFAULT_RETENTION_S: Final = 30 * 24 * 3600
DEFAULT_ORPHAN_AGE_S: Final = 24 * 3600
DEFAULT_MAX_TRANSFERS_PER_KEY: Final = 16
DEFAULT_USAGE_RETENTION_DAYS: Final = 1_095
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def spans_dropped() -> Counter:
    """Return a counter of lost spans, which is in no registry yet."""
    return Counter("cloister_spans_dropped", "Spans of traces that no collector received.", registry=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Limits of the jobs that run at the same time.

    On a Ray cluster that is too small for all of its jobs, jobs that each hold a part of what they need would block
    each other forever.

    Attributes:
        default: for each accelerator that ``by_accelerator`` does not name.
        by_accelerator: by the accelerator's name.
    """

    default: int = 2
    by_accelerator: Mapping[str, int] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Return the parameters of queries."""
        return {"slots": Jsonb(dict(self.by_accelerator)), "default_slots": self.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Open connections of a process, and the facts about the stack that go with them.

    ``service.compose`` opens and closes them. ``service.reconciler.backends`` adds the launcher.

    Attributes:
        pool: connections to Postgres.
        store: the object store.
        catalogue: the models that the stack serves. They change while it runs, if operators may enable models.
        catalogue_changed_at: aware UTC time of the last change to the catalogue's file.
        slots: how many jobs may run at the same time; projects take turns.
        retention_s: the most seconds for which files and ended batches are kept. A project can set another.
        workspace: the disk for uploads and partial results, and for plans and results of batches.
        encryption_keys: keys of stored secrets; None where no secret can be stored or read.
        max_transfers_per_key: large uploads and partial results that a key may have at a time in this process.
        max_key_lifetime: how long after its creation an API key expires at the latest; None for no limit.
        oidc: the issuer whose tokens people sign in with; None for API keys only.
        webhook_networks: networks that webhooks may be sent to besides public addresses.
        receipt_key: signs the receipts of deletions. A process that deletes nothing needs no lasting one.
        orphan_age_s: seconds after which an object that belongs to nothing is deleted.
        usage_retention_days: days for which the usage of a day is kept.
        traces: the spans of this process.
        spans_dropped: counts those that no collector received; each process adds it to its metrics.
    """

    pool: Pool
    store: ObjectStore
    catalogue: Catalogue = field(default_factory=dict)
    catalogue_changed_at: datetime = _EPOCH
    slots: Slots = field(default_factory=Slots)
    retention_s: int = DEFAULT_RETENTION_S
    workspace: Workspace = field(default_factory=Workspace)
    encryption_keys: MultiFernet | None = None
    max_transfers_per_key: int = DEFAULT_MAX_TRANSFERS_PER_KEY
    max_key_lifetime: timedelta | None = None
    oidc: "Issuer | None" = None
    webhook_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    receipt_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)
    orphan_age_s: int = DEFAULT_ORPHAN_AGE_S
    usage_retention_days: int = DEFAULT_USAGE_RETENTION_DAYS
    traces: Traces = field(default_factory=Traces)
    spans_dropped: Counter = field(default_factory=spans_dropped)
