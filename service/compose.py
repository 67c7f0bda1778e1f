"""Open the backends that the settings name. Only this module knows which adapters exist."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

from prometheus_client import Counter

from service.adapters.open_object_store import open_object_store
from service.backends import Backends, Slots, spans_dropped
from service.db import open_pool
from service.model_catalogue import load_catalogue_file
from service.models_at_run_time import LiveCatalogue
from service.oidc.tokens import Issuer
from service.receipts import read_key
from service.settings import Settings
from service.stored_secrets import read_encryption_keys
from service.traces import Traces
from service.workspace import Workspace


@contextlib.contextmanager
def open_backends(
    settings: Settings, process: str, *, max_connections: int = 10, deletes: bool = True
) -> Iterator[Backends]:
    """Open the database, the object store and the model catalogue, and close them on exit.

    The database and S3 may still be unreachable.

    Args:
        settings: the settings of the service.
        process: the name of the process in traces, e.g. ``api``.
        max_connections: the most connections to the database.
        deletes: whether the process deletes content, and so needs the key that signs receipts.

    Raises:
        SettingsError: the model catalogue or the file of encryption keys is invalid, or the process deletes and has no
            key for receipts.
        KeysError: the public keys in ``CLOISTER_OIDC`` cannot be used.
        ObjectStoreError: the directory of the object store cannot be created.
    """
    file = load_catalogue_file(settings.models_path)
    keys = read_encryption_keys(settings.encryption_keys_file) if settings.encryption_keys_file else None
    receipt_key = {"receipt_key": read_key(settings.receipt_key_file)} if deletes else {}
    store = open_object_store(settings.object_store)
    dropped = spans_dropped()
    with (
        open_pool(settings.database_url, max_size=max_connections) as pool,
        _open_traces(settings, process, dropped) as traces,
    ):
        yield Backends(
            pool=pool,
            store=store,
            catalogue=LiveCatalogue(file, pool) if file.at_run_time.allow else file.models,
            catalogue_changed_at=datetime.fromtimestamp(settings.models_path.stat().st_mtime, UTC),
            slots=Slots(default=settings.max_running_jobs, by_accelerator=settings.max_running_jobs_by_accelerator),
            retention_s=settings.retention_days * 24 * 3600,
            workspace=Workspace(size_bytes=settings.workspace_bytes),
            encryption_keys=keys,
            max_transfers_per_key=settings.max_transfers_per_key,
            max_key_lifetime=settings.max_key_lifetime,
            oidc=Issuer(settings.oidc) if settings.oidc else None,
            webhook_networks=settings.webhook_networks,
            orphan_age_s=settings.orphan_age_hours * 3600,
            usage_retention_days=settings.usage_retention_days,
            traces=traces,
            spans_dropped=dropped,
            **receipt_key,
        )


@contextlib.contextmanager
def _open_traces(settings: Settings, process: str, dropped: Counter) -> Iterator[Traces]:
    """Open the connection to the collector, if there is one, and close it on exit."""
    if not settings.otlp_endpoint:
        yield Traces()
        return
    # OpenTelemetry is imported only where it is used.
    from service.adapters.otlp_spans import OtlpSpans

    with OtlpSpans(settings.otlp_endpoint, process=process, dropped=dropped) as spans:
        yield Traces(spans, segments=settings.trace_segments)
