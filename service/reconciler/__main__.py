"""``python -m service.reconciler``: reconcile until SIGTERM or SIGINT."""

import contextlib
import os
import signal
import sys
from threading import Event

import structlog

from service import compose
from service.adapters.open_launcher import open_launcher
from service.errors import CloisterError, SettingsError
from service.logging import configure_logging
from service.model_catalogue import load_catalogue
from service.reconciler.backends import Backends
from service.reconciler.health import serve_health
from service.reconciler.loop import run
from service.settings import read_settings

logger = structlog.get_logger(__name__)


def main() -> int:
    """Open the backends, serve the health endpoint if it has a port, and run the loop.

    Returns:
        The exit status: 0, or 2 if a setting, the model catalogue or a job template is invalid.
    """
    stopping = Event()
    try:
        settings = read_settings(os.environ)
        configure_logging(settings.log_level)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        with contextlib.ExitStack() as closing:
            opened = closing.enter_context(compose.open_backends(settings, "reconciler", max_connections=12))
            models = load_catalogue(settings.models_path)
            backends = Backends(
                pool=opened.pool,
                store=opened.store,
                launcher=closing.enter_context(open_launcher(settings, models, os.environ)),
                catalogue=opened.catalogue,
                coordinator_url=settings.coordinator_url,
                workspace=opened.workspace,
                slots=opened.slots,
                retention_s=opened.retention_s,
                webhook_networks=opened.webhook_networks,
                encryption_keys=opened.encryption_keys,
                receipt_key=opened.receipt_key,
                orphan_age_s=opened.orphan_age_s,
                usage_retention_days=opened.usage_retention_days,
                traces=opened.traces,
                spans_dropped=opened.spans_dropped,
                stopping=stopping,
            )
            backends.metrics.registry.register(backends.spans_dropped)
            if settings.health_port:
                try:
                    closing.enter_context(serve_health(backends, host=settings.host, port=settings.health_port))
                except OSError as error:
                    address = f"{settings.host}:{settings.health_port}"
                    raise SettingsError(
                        f"CLOISTER_HEALTH_PORT: cannot listen on {address}: {error.strerror}. Choose a free port"
                    ) from error
            run(backends, settings.database_url)
    except CloisterError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    logger.info("reconciler.stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
