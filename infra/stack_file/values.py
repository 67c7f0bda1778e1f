"""Types of the values in a stack file. Each refuses a wrong value with a message that states what is allowed."""

import ipaddress
import re
import ssl
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PlainValidator

from infra.kubernetes.images import ImageReference
from infra.kubernetes.naming import check_customer, check_environment

_LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


def matching(pattern: str, message: str) -> Callable[[str], str]:
    """Return a check that a text matches ``pattern`` as a whole; it fails with ``message``."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(message)
        return value

    return check


def check_cidr(value: str) -> str:
    """Check a network that is not the whole address space."""
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError("must be a network in CIDR notation, e.g. 10.0.0.0/16 or 10.0.0.5/32") from error
    if network.prefixlen == 0:
        raise ValueError("includes every address; name the networks that are meant, e.g. 10.0.0.0/16")
    return str(network)


def check_web_url(value: str) -> str:
    """Check a URL that holds no password."""
    parts = urlsplit(value)
    if parts.scheme not in {"https", "http", "oci"} or not parts.netloc or parts.password:
        raise ValueError("must be a URL with a host and without a password, e.g. https://s3.acme.example")
    return value


def check_postgres_url(value: str) -> str:
    """Check the URL of a database, with a role and without a password."""
    parts = urlsplit(value)
    if parts.password is not None:
        # The message is shown: it does not repeat the value.
        raise ValueError(
            "holds a password; take it out, and `pulumi config set --secret cloister:database_owner_password`"
        )
    if parts.scheme not in {"postgresql", "postgres"} or not (parts.username and parts.hostname and parts.path[1:]):
        raise ValueError("must be postgresql://role@host:5432/database?sslmode=verify-full")
    return value


def check_certificates(value: str) -> str:
    """Check certificates in PEM, without a private key."""
    if "PRIVATE KEY-----" in value:
        # The message is shown: it does not repeat the value.
        raise ValueError("holds a private key; leave it out, and create a new one because this one is disclosed")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=value)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError("must be certificates in PEM, from -----BEGIN CERTIFICATE----- to the end line") from error
    return value


def check_moment(value: str) -> str:
    """Check a time with its offset from UTC."""
    try:
        has_offset = datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        has_offset = False
    if not has_offset:
        raise ValueError("must be a moment with its offset, e.g. 2030-01-31T12:00:00Z")
    return value


def check_unique(values: list[str]) -> list[str]:
    """Check that no value occurs twice."""
    if duplicates := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"must name each once; duplicates: {', '.join(duplicates)}")
    return values


Customer = Annotated[str, AfterValidator(check_customer)]
Environment = Annotated[str, AfterValidator(check_environment)]
Image = Annotated[ImageReference, PlainValidator(ImageReference.parse)]
Registry = Annotated[
    str,
    AfterValidator(
        matching(
            r"[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)*",
            "must be a registry's host, with its port and path if any, without https:// and without a tag",
        )
    ),
]
Cidr = Annotated[str, AfterValidator(check_cidr)]
Cidrs = Annotated[list[Cidr], Field(min_length=1)]
DnsLabel = Annotated[
    str,
    AfterValidator(matching(_LABEL, "must be a Kubernetes name: lower case letters, digits and hyphens, at most 63")),
]
HostName = Annotated[
    str,
    AfterValidator(
        matching(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})+", "must be a host name with a domain, e.g. batch.acme.example")
    ),
]
GatewayName = Annotated[
    str, AfterValidator(matching(rf"{_LABEL}/{_LABEL}(\.{_LABEL})*", "must be namespace/name of a Gateway"))
]
WebUrl = Annotated[str, AfterValidator(check_web_url)]
CronSchedule = Annotated[
    str, AfterValidator(matching(r"\s*\S+(\s+\S+){5}\s*", "must have six fields, seconds first: 0 0 3 * * *"))
]
# The restored cluster's name is longer by nine characters; CloudNativePG accepts 50.
ClusterName = Annotated[
    str,
    AfterValidator(
        matching(
            r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
            "must be the name of a CloudNativePG cluster: lower case letters, digits and hyphens, at most 40",
        )
    ),
]
Certificates = Annotated[str, AfterValidator(check_certificates)]
Moment = Annotated[str, AfterValidator(check_moment)]
PostgresUrl = Annotated[str, AfterValidator(check_postgres_url)]
Nodes = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(check_unique)]
Labels = Annotated[dict[str, str], Field(min_length=1)]
Port = Annotated[int, Field(ge=1, le=65_535)]
