"""The settings of the service, read once from environment variables."""

import re
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
LauncherKind = Literal["ray_jobs", "kuberay"]
_MAX_PORT: Final = 65_535
_MAX_DAYS: Final = 3_650
_MAX_JOBS: Final = 10_000
_MAX_GIB: Final = 100_000
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


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
        launcher: CLOISTER_LAUNCHER, what runs jobs: ``ray_jobs``, the default, a Ray that already runs, by its Jobs
            API; or ``kuberay``, a Ray cluster for each job on Kubernetes.
        ray_address: CLOISTER_RAY_ADDRESS, the HTTP address of the Ray Jobs API.
        job_entrypoint: CLOISTER_JOB_ENTRYPOINT, the shell command that Ray runs as a job; this interpreter with
            ``-m ray_job`` by default.
        kubernetes_namespace: CLOISTER_KUBERNETES_NAMESPACE, where the launcher kuberay makes RayJobs.
        ray_job_templates: CLOISTER_RAY_JOB_TEMPLATES, the directory with the RayJob of each model, which the Pulumi
            program renders from the same model catalogue.
        kubeconfig: CLOISTER_KUBECONFIG, how to reach Kubernetes from outside; None, the default, for the service
            account of the pod.
        max_running_jobs: CLOISTER_MAX_RUNNING_JOBS, jobs that may run at the same time, 2 by default. On a Ray that
            is too small for all of them, jobs that hold a part of what they need block each other for ever.
        retention_days: CLOISTER_RETENTION_DAYS, 30 by default: how long files without an expiry of their own and
            batches that have ended are kept, unless their project says otherwise.
        health_port: CLOISTER_HEALTH_PORT, the TCP port on which the reconciler answers /healthz, /readyz and
            /metrics; 0, the default, for none.
        workspace_bytes: CLOISTER_WORKSPACE_GIB, how much disk below TMPDIR the results of batches that end at the
            same time may take; 0, the default, for all that there is, which is None here.
        log_level: CLOISTER_LOG_LEVEL, the least important level that is logged.
    """

    database_url: str = field(repr=False)
    job_database_url: str
    object_store: ObjectStoreLocation
    models_path: Path
    host: str
    port: int
    launcher: LauncherKind
    ray_address: str
    job_entrypoint: str
    kubernetes_namespace: str
    ray_job_templates: Path
    kubeconfig: Path | None
    max_running_jobs: int
    retention_days: int
    health_port: int
    workspace_bytes: int | None
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
    object_store = _object_store(environment, problems)
    problems += _database_problems(environment)

    def whole_number(name: str, default: int, low: int, high: int) -> int:
        text = environment.get(name, str(default))
        if text.isascii() and text.isdecimal() and low <= int(text) <= high:
            return int(text)
        problems.append(f"{name} must be a whole number from {low} to {high}, not {text!r}")
        return default

    port = whole_number("CLOISTER_PORT", 8000, 1, _MAX_PORT)
    max_running_jobs = whole_number("CLOISTER_MAX_RUNNING_JOBS", 2, 1, _MAX_JOBS)
    retention_days = whole_number("CLOISTER_RETENTION_DAYS", 30, 1, _MAX_DAYS)
    health_port = whole_number("CLOISTER_HEALTH_PORT", 0, 0, _MAX_PORT)
    workspace_gib = whole_number("CLOISTER_WORKSPACE_GIB", 0, 0, _MAX_GIB)
    ray_address = environment.get("CLOISTER_RAY_ADDRESS", "http://127.0.0.1:8265")
    if urlsplit(ray_address).scheme not in {"http", "https"}:
        problems.append(f"CLOISTER_RAY_ADDRESS must start with http:// or https://, not {ray_address!r}")
    log_level = environment.get("CLOISTER_LOG_LEVEL", "info").lower()
    if log_level not in get_args(LogLevel):
        problems.append(f"CLOISTER_LOG_LEVEL must be one of {', '.join(get_args(LogLevel))}, not {log_level!r}")
    problems += _launcher_problems(environment)

    if problems:
        raise SettingsError("wrong settings:\n" + "\n".join(f"  {problem}" for problem in problems))
    return Settings(
        database_url=environment["CLOISTER_DATABASE_URL"],
        job_database_url=environment.get("CLOISTER_JOB_DATABASE_URL", ""),
        object_store=object_store,
        models_path=Path(environment["CLOISTER_MODELS"]),
        host=environment.get("CLOISTER_HOST", "127.0.0.1"),
        port=port,
        launcher=cast("LauncherKind", environment.get("CLOISTER_LAUNCHER", "ray_jobs")),
        ray_address=ray_address,
        job_entrypoint=environment.get("CLOISTER_JOB_ENTRYPOINT", f"{shlex.quote(sys.executable)} -m ray_job"),
        kubernetes_namespace=environment.get("CLOISTER_KUBERNETES_NAMESPACE", ""),
        ray_job_templates=Path(environment.get("CLOISTER_RAY_JOB_TEMPLATES", "")),
        kubeconfig=Path(environment["CLOISTER_KUBECONFIG"]) if environment.get("CLOISTER_KUBECONFIG") else None,
        max_running_jobs=max_running_jobs,
        retention_days=retention_days,
        health_port=health_port,
        workspace_bytes=workspace_gib * 2**30 or None,
        log_level=cast("LogLevel", log_level),
    )


def _object_store(environment: Mapping[str, str], problems: list[str]) -> ObjectStoreLocation:
    try:
        if url := environment.get("CLOISTER_OBJECT_STORE"):
            return parse_object_store_url(url)
    except SettingsError as error:
        problems.append(f"CLOISTER_OBJECT_STORE: {error}")
    return ObjectStoreLocation(kind="directory")


def _launcher_problems(environment: Mapping[str, str]) -> list[str]:
    """What is wrong with the launcher's settings; those of the other launcher may be whatever they are."""
    launcher = environment.get("CLOISTER_LAUNCHER", "ray_jobs")
    if launcher not in get_args(LauncherKind):
        return [f"CLOISTER_LAUNCHER must be one of {', '.join(get_args(LauncherKind))}, not {launcher!r}"]
    if launcher != "kuberay":
        return []
    problems: list[str] = []
    namespace = environment.get("CLOISTER_KUBERNETES_NAMESPACE", "")
    if not _NAMESPACE.fullmatch(namespace):
        problems.append(
            f"CLOISTER_KUBERNETES_NAMESPACE must name the namespace of the RayJobs, which the launcher kuberay needs, "
            f"not {namespace!r}"
        )
    templates = environment.get("CLOISTER_RAY_JOB_TEMPLATES", "")
    if not templates or not Path(templates).is_dir():
        problems.append(
            f"CLOISTER_RAY_JOB_TEMPLATES must name the directory of the RayJob templates, which the launcher kuberay "
            f"needs, not {templates!r}"
        )
    kubeconfig = environment.get("CLOISTER_KUBECONFIG", "")
    if kubeconfig and not Path(kubeconfig).is_file():
        problems.append(f"CLOISTER_KUBECONFIG: there is no file {kubeconfig}")
    return problems


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
