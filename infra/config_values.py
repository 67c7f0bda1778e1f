"""The values that a stack file's keys take, each with a check whose message says what is allowed."""

import ipaddress
import re
from datetime import datetime
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from infra.images import ImageReference
from infra.naming import check_customer, check_environment

_LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_REGISTRY: Final = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)*")
_CRON_FIELDS: Final = 6
_MAX_HOST_NAME: Final = 253


def _image(value: str) -> str:
    ImageReference.parse(value)
    return value


def _registry(value: str) -> str:
    if not _REGISTRY.fullmatch(value):
        raise ValueError("must be a registry's host, its port and path if any, without https:// and without a tag")
    return value


def _cidr(value: str) -> str:
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError("must be a network in CIDR notation, e.g. 10.0.0.0/16 or 10.0.0.5/32") from error
    if network.prefixlen == 0:
        raise ValueError("is every address there is; name the networks that are meant, e.g. 10.0.0.0/16")
    return str(network)


def _label(value: str) -> str:
    if not re.fullmatch(_LABEL, value):
        raise ValueError("must be a Kubernetes name: lower case letters, digits and hyphens, at most 63")
    return value


def _host_name(value: str) -> str:
    if len(value) > _MAX_HOST_NAME or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})+", value):
        raise ValueError("must be a host name with a domain, e.g. batch.acme.example")
    return value


def _web_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"https", "http", "oci"} or not parts.netloc or parts.password:
        raise ValueError("must be a URL with a host and without a password, e.g. https://s3.acme.example")
    return value


def _postgres_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.password is not None:
        # The message is shown: it does not repeat the value.
        raise ValueError(
            "holds a password; take it out, and `pulumi config set --secret cloister:database_owner_password`"
        )
    if parts.scheme not in {"postgresql", "postgres"} or not (parts.username and parts.hostname and parts.path[1:]):
        raise ValueError("must be postgresql://role@host:5432/database?sslmode=verify-full")
    return value


def _schedule(value: str) -> str:
    if len(value.split()) != _CRON_FIELDS:
        raise ValueError("must have six fields, seconds first: 0 0 3 * * *")
    return value


def _moment(value: str) -> str:
    try:
        known = datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        known = False
    if not known:
        raise ValueError("must be a moment with its offset, e.g. 2030-01-31T12:00:00Z")
    return value


def _unique(values: list[str]) -> list[str]:
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"must name each once; twice there: {', '.join(twice)}")
    return values


Customer = Annotated[str, AfterValidator(check_customer)]
Environment = Annotated[str, AfterValidator(check_environment)]
Image = Annotated[str, AfterValidator(_image)]
Registry = Annotated[str, AfterValidator(_registry)]
Cidr = Annotated[str, AfterValidator(_cidr)]
Cidrs = Annotated[list[Cidr], Field(min_length=1)]
DnsLabel = Annotated[str, AfterValidator(_label)]
HostName = Annotated[str, AfterValidator(_host_name)]
WebUrl = Annotated[str, AfterValidator(_web_url)]
CronSchedule = Annotated[str, AfterValidator(_schedule)]
Moment = Annotated[str, AfterValidator(_moment)]
PostgresUrl = Annotated[str, AfterValidator(_postgres_url)]
Nodes = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(_unique)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65_535)]
