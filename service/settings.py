"""The settings of the service, read once from environment variables."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from ray_job.contract.job_spec import ObjectStoreLocation
from service.errors import SettingsError

LogLevel = Literal["debug", "info", "warning", "error"]
_MAX_PORT: Final = 65_535
_MAX_DAYS: Final = 3_650


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the API and the reconciler share.

    Attributes:
        database_url: CLOISTER_DATABASE_URL, a libpq connection string of the service's own role.
        job_database_url: CLOISTER_JOB_DATABASE_URL, the connection string that jobs are given. It must hold no
            password, because a job's spec can be read in Ray's dashboard; jobs find it by PGPASSFILE. Empty: jobs
            report no progress.
        object_store: CLOISTER_OBJECT_STORE, ``file:///directory`` or
            ``s3://bucket/prefix?endpoint_url=…&region=…``.
        models_path: CLOISTER_MODELS, the path of the model catalogue, a YAML file.
        host: CLOISTER_HOST, the address to listen on; this machine only by default.
        port: CLOISTER_PORT, the TCP port to listen on.
        ray_address: CLOISTER_RAY_ADDRESS, the HTTP address of the Ray Jobs API.
        job_entrypoint: CLOISTER_JOB_ENTRYPOINT, the shell command that Ray runs as a job; this interpreter with
            ``-m ray_job`` by default.
        max_running_jobs: CLOISTER_MAX_RUNNING_JOBS, jobs that may run at the same time, 2 by default. On a Ray that
            is too small for all of them, jobs that hold a part of what they need block each other for ever.
        retention_days: CLOISTER_RETENTION_DAYS, 30 by default: how long files without an expiry of their own and
            batches that have ended are kept, unless their project says otherwise.
        health_port: CLOISTER_HEALTH_PORT, the TCP port on which the reconciler answers /healthz, /readyz and
            /metrics; 0, the default, for none.
        log_level: CLOISTER_LOG_LEVEL, the least important level that is logged.
    """

    database_url: str = field(repr=False)
    job_database_url: str
    object_store: ObjectStoreLocation
    models_path: Path
    host: str
    port: int
    ray_address: str
    job_entrypoint: str
    max_running_jobs: int
    retention_days: int
    health_port: int
    log_level: LogLevel


def parse_object_store_url(url: str) -> ObjectStoreLocation:
    """Reads ``file:///directory`` or ``s3://bucket/prefix?endpoint_url=…&region=…``.

    Raises:
        SettingsError: neither of the two, or a query parameter that is not known.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme == "file" and not parts.netloc and path.strip("/"):
        return ObjectStoreLocation(kind="directory", root=path)
    if parts.scheme != "s3" or not parts.netloc:
        raise SettingsError(f"{url!r} is neither file:///directory nor s3://bucket/prefix")
    options = dict(parse_qsl(parts.query))
    endpoint_url, region = options.pop("endpoint_url", ""), options.pop("region", "")
    if options:
        raise SettingsError(f"{', '.join(options)} not known; s3:// takes endpoint_url and region")
    if endpoint_url and urlsplit(endpoint_url).scheme not in {"http", "https"}:
        raise SettingsError(f"endpoint_url must start with http:// or https://, not {endpoint_url!r}")
    return ObjectStoreLocation(
        kind="s3", bucket=parts.netloc, prefix=path.strip("/"), endpoint_url=endpoint_url, region=region
    )


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Builds the settings from environment variables.

    Raises:
        SettingsError: one or more settings are missing or wrong; the message lists all of them.
    """
    required = ("CLOISTER_DATABASE_URL", "CLOISTER_OBJECT_STORE", "CLOISTER_MODELS")
    problems = [f"{name} is not set" for name in required if not environment.get(name)]

    object_store = ObjectStoreLocation(kind="directory")
    if url := environment.get("CLOISTER_OBJECT_STORE"):
        try:
            object_store = parse_object_store_url(url)
        except SettingsError as error:
            problems.append(f"CLOISTER_OBJECT_STORE: {error}")

    problems += _database_problems(environment)
    port = environment.get("CLOISTER_PORT", "8000")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= _MAX_PORT):
        problems.append(f"CLOISTER_PORT must be a whole number from 1 to {_MAX_PORT}, not {port!r}")
    ray_address = environment.get("CLOISTER_RAY_ADDRESS", "http://127.0.0.1:8265")
    if urlsplit(ray_address).scheme not in {"http", "https"}:
        problems.append(f"CLOISTER_RAY_ADDRESS must start with http:// or https://, not {ray_address!r}")
    max_running_jobs = environment.get("CLOISTER_MAX_RUNNING_JOBS", "2")
    if not (max_running_jobs.isascii() and max_running_jobs.isdecimal() and int(max_running_jobs) > 0):
        problems.append(f"CLOISTER_MAX_RUNNING_JOBS must be a whole number of at least 1, not {max_running_jobs!r}")
    retention_days = environment.get("CLOISTER_RETENTION_DAYS", "30")
    if not (retention_days.isascii() and retention_days.isdecimal() and 0 < int(retention_days) <= _MAX_DAYS):
        problems.append(f"CLOISTER_RETENTION_DAYS must be a whole number from 1 to {_MAX_DAYS}, not {retention_days!r}")
    health_port = environment.get("CLOISTER_HEALTH_PORT", "0")
    if not (health_port.isascii() and health_port.isdecimal() and int(health_port) <= _MAX_PORT):
        problems.append(f"CLOISTER_HEALTH_PORT must be a whole number from 0 to {_MAX_PORT}, not {health_port!r}")
    log_level = environment.get("CLOISTER_LOG_LEVEL", "info").lower()
    if log_level not in get_args(LogLevel):
        problems.append(f"CLOISTER_LOG_LEVEL must be one of {', '.join(get_args(LogLevel))}, not {log_level!r}")

    if problems:
        raise SettingsError("wrong settings:\n" + "\n".join(f"  {problem}" for problem in problems))
    return Settings(
        database_url=environment["CLOISTER_DATABASE_URL"],
        job_database_url=environment.get("CLOISTER_JOB_DATABASE_URL", ""),
        object_store=object_store,
        models_path=Path(environment["CLOISTER_MODELS"]),
        host=environment.get("CLOISTER_HOST", "127.0.0.1"),
        port=int(port),
        ray_address=ray_address,
        job_entrypoint=environment.get("CLOISTER_JOB_ENTRYPOINT", f"{shlex.quote(sys.executable)} -m ray_job"),
        max_running_jobs=int(max_running_jobs),
        retention_days=int(retention_days),
        health_port=int(health_port),
        log_level=cast("LogLevel", log_level),
    )


def _database_problems(environment: Mapping[str, str]) -> list[str]:
    problems: list[str] = []
    for name in ("CLOISTER_DATABASE_URL", "CLOISTER_JOB_DATABASE_URL"):
        try:
            options = conninfo_to_dict(environment.get(name, ""))
        except ProgrammingError:
            # The parser's own message may quote the password.
            problems.append(f"{name} is not a libpq connection string, e.g. postgresql://user@host/database")
            continue
        if name == "CLOISTER_JOB_DATABASE_URL" and options.get("password"):
            problems.append(f"{name} must hold no password; give it to jobs by PGPASSFILE")
    return problems
