"""``python -m service.reconciler``: reconciles until SIGTERM or SIGINT."""

import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from threading import Event

import structlog

from service.adapters.ray_jobs_launcher import RayJobsLauncher
from service.compose import open_backends
from service.errors import CloisterError, SettingsError
from service.logging import configure_logging
from service.reconciler.context import Context
from service.reconciler.loop import run
from service.settings import Settings, read_settings

logger = structlog.get_logger(__name__)

# Jobs find the password of their database role by this file.
_PASSED_ON = ("PGPASSFILE",)


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


def _ray_token(environment: Mapping[str, str]) -> str:
    """The token of a Ray with token authentication, from the file that Ray's own variable names."""
    path = environment.get("RAY_AUTH_TOKEN_PATH", "")
    try:
        return Path(path).read_text().strip() if path else ""
    except OSError as error:
        raise SettingsError(f"RAY_AUTH_TOKEN_PATH: cannot read {path}: {error.strerror}") from error


def _run(settings: Settings) -> None:
    stopping = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    with (
        open_backends(settings, max_connections=8) as backends,
        RayJobsLauncher(
            settings.ray_address,
            entrypoint=settings.job_entrypoint,
            environment=environment,
            token=_ray_token(os.environ),
        ) as launcher,
    ):
        context = Context(
            pool=backends.pool,
            store=backends.store,
            launcher=launcher,
            catalogue=backends.catalogue,
            job_database_url=settings.job_database_url,
            workspace=Path(tempfile.gettempdir()),
            max_running_jobs=settings.max_running_jobs,
            stopping=stopping,
        )
        run(context, settings.database_url)
    logger.info("reconciler.stopped")


if __name__ == "__main__":
    sys.exit(main())
