"""``python -m service.reconciler``: reconciles until SIGTERM or SIGINT."""

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from threading import Event

import structlog

from service.adapters.open_launcher import open_launcher
from service.compose import open_backends
from service.errors import CloisterError, SettingsError
from service.logging import configure_logging
from service.reconciler.context import Context
from service.reconciler.health import serve_health
from service.reconciler.loop import run
from service.settings import Settings, read_settings
from service.workspace import Workspace

logger = structlog.get_logger(__name__)


def main() -> int:
    """Returns the exit status: 0, or 2 when the settings or the catalogue are wrong."""
    try:
        settings = read_settings(os.environ)
        configure_logging(settings.log_level)
        _run(settings)
    except CloisterError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _serve_health(context: Context, settings: Settings, until: contextlib.ExitStack) -> None:
    if not settings.health_port:
        return
    try:
        until.enter_context(serve_health(context, host=settings.host, port=settings.health_port))
    except OSError as error:
        where = f"{settings.host}:{settings.health_port}"
        raise SettingsError(f"CLOISTER_HEALTH_PORT: cannot listen on {where}: {error.strerror}") from error


def _run(settings: Settings) -> None:
    stopping = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with (
        open_backends(settings, max_connections=12) as backends,
        open_launcher(settings, backends.catalogue, os.environ) as launcher,
    ):
        context = Context(
            pool=backends.pool,
            store=backends.store,
            launcher=launcher,
            catalogue=backends.catalogue,
            job_database_url=settings.job_database_url,
            workspace=Workspace(Path(tempfile.gettempdir()), settings.workspace_bytes),
            max_running_jobs=settings.max_running_jobs,
            retention_s=settings.retention_days * 24 * 3600,
            stopping=stopping,
        )
        with contextlib.ExitStack() as until:
            _serve_health(context, settings, until)
            run(context, settings.database_url)
    logger.info("reconciler.stopped")


if __name__ == "__main__":
    sys.exit(main())
