"""The settings of the service, read once from environment variables whose names start with ``CLOISTER_``."""

import re
import shlex
import sys
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ray_job.contract.job_spec import ObjectStoreLocation
from service.backends import DEFAULT_MAX_TRANSFERS_PER_KEY, DEFAULT_USAGE_RETENTION_DAYS
from service.config_sections import problems_of
from service.db.login import libpq_url
from service.errors import SettingsError
from service.oidc.section import OidcSection
from service.traces import DEFAULT_SEGMENTS

LogLevel = Literal["debug", "info", "warning", "error"]
LauncherKind = Literal["ray_jobs", "kuberay"]
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def parse_object_store_url(url: str) -> ObjectStoreLocation:
    """Parse ``file:///directory`` or ``s3://bucket/prefix?endpoint_url=…&region=…``.

    Raises:
        ValueError: the URL has another form, or an unknown query parameter.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme == "file" and not parts.netloc and path.strip("/"):
        return ObjectStoreLocation(kind="directory", root=path)
    if parts.scheme != "s3" or not parts.netloc:
        raise ValueError(f"{url!r} is neither file:///directory nor s3://bucket/prefix")
    options = dict(parse_qsl(parts.query))
    endpoint_url, region = options.pop("endpoint_url", ""), options.pop("region", "")
    if options:
        raise ValueError(f"unknown parameter {', '.join(options)}; s3:// takes endpoint_url and region")
    if endpoint_url and urlsplit(endpoint_url).scheme not in {"http", "https"}:
        raise ValueError(f"endpoint_url must start with http:// or https://, not {endpoint_url!r}")
    return ObjectStoreLocation(
        kind="s3", bucket=parts.netloc, prefix=path.strip("/"), endpoint_url=endpoint_url, region=region
    )


def parse_slots(value: Any) -> Any:
    """Read jobs by accelerator, e.g. ``a10g=3,v100=1``."""
    if not isinstance(value, str):
        return value
    found: dict[str, int] = {}
    for item in value.split(","):
        name, _, count = item.strip().partition("=")
        if not name or not count.isdecimal() or len(count) > len("10000") or int(count) < 1:
            raise ValueError("must be jobs by accelerator, e.g. a10g=3,v100=1")
        found[name] = int(count)
    return found


def parse_networks(value: Any) -> Any:
    """Read networks in CIDR notation, e.g. ``10.40.0.0/16,fd12::/16``."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(ip_network(item.strip()) for item in value.split(","))
    except ValueError as error:
        raise ValueError("must be networks in CIDR notation, e.g. 10.40.0.0/16,fd12::/16") from error


def parse_oidc(value: Any) -> Any:
    """Read the section ``oidc`` of a stack file from JSON."""
    if not isinstance(value, str):
        return value
    try:
        return OidcSection.model_validate_json(value)
    except ValidationError as error:
        problems = problems_of(error, OidcSection, None)
        raise ValueError(f"is no section oidc as JSON: {'; '.join(map(str, problems))}") from error


class Settings(BaseSettings):
    """The settings that the API and the reconciler share. A variable that is set but empty counts as not set."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_ignore_empty=True, validate_default=True, use_attribute_docstrings=True
    )

    # Backends.
    database_url: str = Field(validation_alias="CLOISTER_DATABASE_URL", repr=False)
    """libpq connection string of the service's own role; ``service.db.login`` has further parameters."""
    object_store: Annotated[ObjectStoreLocation, NoDecode, BeforeValidator(parse_object_store_url)] = Field(
        validation_alias="CLOISTER_OBJECT_STORE"
    )
    """``file:///directory`` or ``s3://bucket/prefix?endpoint_url=…&region=…``."""
    models_path: Path = Field(validation_alias="CLOISTER_MODELS")
    """Path of the model catalogue, a YAML file."""
    encryption_keys_file: Path | None = Field(None, validation_alias="CLOISTER_ENCRYPTION_KEYS_FILE")
    """Path of a file with keys for the webhook secrets in the database, separated by commas or white space. The first
    encrypts, all decrypt; ``openssl rand -base64 32`` prints one. API and reconciler need it for webhooks."""

    # Servers.
    host: str = Field("127.0.0.1", validation_alias="CLOISTER_HOST")
    """Address to listen on; only this machine by default. ``::`` stands for all addresses, IPv4 and IPv6."""
    port: int = Field(8000, ge=1, le=65_535, validation_alias="CLOISTER_PORT")
    """TCP port of the API."""
    coordinator_port: int = Field(8100, ge=1, le=65_535, validation_alias="CLOISTER_COORDINATOR_PORT")
    """TCP port of the coordinator, from which jobs lease segments."""
    coordinator_metrics_port: int = Field(0, ge=0, le=65_535, validation_alias="CLOISTER_COORDINATOR_METRICS_PORT")
    """TCP port of the coordinator for /metrics; 0 for none. Its own port, because jobs reach the other one."""
    health_port: int = Field(0, ge=0, le=65_535, validation_alias="CLOISTER_HEALTH_PORT")
    """TCP port of the reconciler for /healthz, /readyz and /metrics; 0 for none."""
    log_level: Annotated[LogLevel, BeforeValidator(str.lower)] = Field("info", validation_alias="CLOISTER_LOG_LEVEL")
    """The least important level that is logged."""

    # Jobs.
    launcher: LauncherKind = Field("ray_jobs", validation_alias="CLOISTER_LAUNCHER")
    """``ray_jobs``: jobs of a running Ray, through its Jobs API. ``kuberay``: a Ray cluster per job on Kubernetes."""
    ray_address: str = Field("http://127.0.0.1:8265", validation_alias="CLOISTER_RAY_ADDRESS")
    """HTTP address of the Ray Jobs API."""
    coordinator_url: str = Field("http://127.0.0.1:8100", validation_alias="CLOISTER_COORDINATOR_URL")
    """HTTP address of the coordinator, as jobs reach it."""
    job_entrypoint: str = Field(f"{shlex.quote(sys.executable)} -m ray_job", validation_alias="CLOISTER_JOB_ENTRYPOINT")
    """Shell command that Ray runs as a job."""
    kubernetes_namespace: str = Field("", validation_alias="CLOISTER_KUBERNETES_NAMESPACE")
    """Namespace in which the launcher kuberay creates RayJobs."""
    ray_job_templates: Path = Field(Path(), validation_alias="CLOISTER_RAY_JOB_TEMPLATES")
    """Directory with the RayJob template of each model, which the Pulumi program renders from the model catalogue."""
    kubeconfig: Path | None = Field(None, validation_alias="CLOISTER_KUBECONFIG")
    """Kubeconfig for access from outside the cluster; None for the service account of the pod."""
    max_running_jobs: int = Field(2, ge=1, le=10_000, validation_alias="CLOISTER_MAX_RUNNING_JOBS")
    """The most jobs that run at the same time on each accelerator. On a Ray that is too small for all of them, jobs
    that each hold a part of what they need block each other forever."""
    max_running_jobs_by_accelerator: Annotated[dict[str, int], NoDecode, BeforeValidator(parse_slots)] = Field(
        default={}, validation_alias="CLOISTER_MAX_RUNNING_JOBS_BY_ACCELERATOR"
    )
    """The same for some accelerators, e.g. ``a10g=3,v100=1``."""

    # Storage.
    retention_days: int = Field(30, ge=1, le=3_650, validation_alias="CLOISTER_RETENTION_DAYS")
    """The most days for which files and ended batches are kept. A project can set another time."""
    usage_retention_days: int = Field(
        DEFAULT_USAGE_RETENTION_DAYS, ge=31, le=36_500, validation_alias="CLOISTER_USAGE_RETENTION_DAYS"
    )
    """Days for which usage and costs by day, project and model are kept. They outlive batches and files."""
    orphan_age_hours: int = Field(24, ge=6, le=87_600, validation_alias="CLOISTER_ORPHAN_AGE_HOURS")
    """Hours after which the reconciler deletes objects that belong to no file and no batch, and unfinished uploads.
    Longer than every upload, lease and signed URL."""
    receipt_key_file: Path | None = Field(None, validation_alias="CLOISTER_RECEIPT_KEY_FILE")
    """File with the private key that signs deletion receipts, for API and reconciler: 64 hexadecimal digits."""
    workspace_gib: int = Field(0, ge=0, le=100_000, validation_alias="CLOISTER_WORKSPACE_GIB")
    """Disk below TMPDIR of each process, in GiB: for uploads and partial results in the API, and for batches that are
    planned or assembled at the same time in the reconciler; 0 for all of the disk."""
    max_transfers_per_key: int = Field(
        DEFAULT_MAX_TRANSFERS_PER_KEY, ge=1, le=10_000, validation_alias="CLOISTER_MAX_TRANSFERS_PER_KEY"
    )
    """The most uploads and partial results of more than 1 MiB that an API process handles at a time for one API key."""

    # Clients.
    trusted_proxies: Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(parse_networks)] = (
        Field(default=(), validation_alias="CLOISTER_TRUSTED_PROXIES")
    )
    """Networks of the proxies that may state the address of a client in ``X-Forwarded-For``, e.g. ``10.0.5.0/24``."""
    max_key_days: int = Field(0, ge=0, le=36_500, validation_alias="CLOISTER_MAX_KEY_DAYS")
    """Days after which any API key expires, counted from its creation; 0 for no limit."""

    oidc: Annotated[OidcSection | None, NoDecode, BeforeValidator(parse_oidc)] = Field(
        None, validation_alias="CLOISTER_OIDC"
    )
    """The issuer whose tokens people sign in with: the section ``oidc`` of a stack file, as JSON."""

    # Webhooks.
    webhook_networks: Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(parse_networks)] = (
        Field(default=(), validation_alias="CLOISTER_WEBHOOK_NETWORKS")
    )
    """Networks that webhooks may be sent to besides public addresses, e.g. ``10.40.0.0/16``."""

    # Traces.
    otlp_endpoint: str = Field("", validation_alias="CLOISTER_OTLP_ENDPOINT")
    """Address of an OpenTelemetry collector that receives the traces of batches by OTLP over HTTP, without
    ``/v1/traces``; empty for no traces."""
    trace_segments: float = Field(DEFAULT_SEGMENTS, ge=0, le=1, validation_alias="CLOISTER_TRACE_SEGMENTS")
    """Share of the segments that have spans, from 0 to 1. The first one of each batch always has them."""

    @property
    def max_key_lifetime(self) -> timedelta | None:
        """``max_key_days`` as a duration; None for no limit."""
        return timedelta(days=self.max_key_days) if self.max_key_days else None

    @property
    def workspace_bytes(self) -> int | None:
        """``workspace_gib`` in bytes; None for all of the disk."""
        return self.workspace_gib * 2**30 or None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the arguments: ``read_settings`` passes the environment that its caller chose."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @field_validator("database_url")
    @classmethod
    def _check_connection_string(cls, value: str) -> str:
        try:
            conninfo_to_dict(libpq_url(value))
        except ProgrammingError:
            # The parser's own message may quote the password.
            raise ValueError("is not a libpq connection string, e.g. postgresql://user@host/database") from None
        return value

    @field_validator("ray_address", "coordinator_url", "otlp_endpoint")
    @classmethod
    def _check_http_address(cls, value: str) -> str:
        if value and urlsplit(value).scheme not in {"http", "https"}:
            raise ValueError("must start with http:// or https://")
        return value

    @field_validator("kubernetes_namespace", "ray_job_templates", "kubeconfig")
    @classmethod
    def _check_kuberay(cls, value: Any, info: ValidationInfo) -> Any:
        """Check the settings of the launcher kuberay, if it is the one in use."""
        if info.data.get("launcher") != "kuberay":
            return value
        if info.field_name == "kubernetes_namespace" and not _NAMESPACE.fullmatch(value):
            raise ValueError("must name the namespace of the RayJobs, because CLOISTER_LAUNCHER is kuberay")
        if info.field_name == "ray_job_templates" and (value == Path() or not value.is_dir()):
            raise ValueError("must name the directory of the RayJob templates, because CLOISTER_LAUNCHER is kuberay")
        if info.field_name == "kubeconfig" and value is not None and not value.is_file():
            raise ValueError("must name an existing file")
        return value


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Build the settings from environment variables.

    Raises:
        SettingsError: one or more settings are missing or invalid; the message lists all of them.
    """
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): value for name, value in environment.items() if value}
    problems = []
    fields = {str(field.validation_alias): field for field in Settings.model_fields.values()}
    try:
        return Settings(**source())
    except ValidationError as error:
        for details in error.errors():
            name = str(details["loc"][0])  # the variable, or the field if its default is invalid
            if name in Settings.model_fields:
                name = str(Settings.model_fields[name].validation_alias)
            reason = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            if fields[name].annotation is int:
                low, high = fields[name].metadata
                reason = f"must be a whole number from {low.ge} to {high.le}"
            if details["type"] == "missing":
                problems.append(f"{name} is not set")
            elif name in {"CLOISTER_OBJECT_STORE", "CLOISTER_OIDC"}:
                problems.append(f"{name}: {reason}")
            elif name == "CLOISTER_DATABASE_URL":  # a connection string can hold a password
                problems.append(f"{name} {reason}")
            else:
                problems.append(f"{name} {reason}, not {str(details['input'])!r}")
    raise SettingsError("\n  ".join(["invalid settings:", *problems]))
