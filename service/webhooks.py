"""Webhook endpoints, to which the end of a project's batches is posted, and the signatures of the messages.

Messages and signatures follow Standard Webhooks, as OpenAI's do. The official client verifies them with
``client.webhooks.unwrap``. Sources: https://www.standardwebhooks.com and
https://platform.openai.com/docs/guides/webhooks.
"""

import base64
import ipaddress
import random
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

import orjson
from cryptography.fernet import MultiFernet
from standardwebhooks import Webhook

from service.audit.log import Actor
from service.db import Pool, query
from service.errors import CloisterError
from service.stored_secrets import encrypt

MAX_URL_LENGTH: Final = 2_048

# OpenAI retries for the same time.
GIVEN_UP_AFTER: Final = timedelta(hours=72)
_FIRST_RETRY_S: Final = 5
_MAX_RETRY_S: Final = 4 * 3600

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Clouds hand out a machine's credentials at these addresses. Sources, by provider: AWS and most others (link-local,
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html), Alibaba Cloud
# (https://www.alibabacloud.com/help/en/ecs/user-guide/view-instance-metadata), Azure
# (https://learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16), Oracle Cloud
# (https://docs.oracle.com/iaas/Content/Compute/Tasks/gettingmetadata.htm), Google Cloud
# (https://cloud.google.com/compute/docs/metadata/querying-metadata).
_METADATA: Final[tuple[IpNetwork, ...]] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "100.100.100.200",
        "168.63.129.16",
        "169.254.0.0/16",
        "192.0.0.192",
        "fd00:c1::/32",
        "fd00:ec2::/32",
        "fd20:ce::/32",
        "fe80::/10",
    )
)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052
# RFC 8215. Each network chooses where such an address embeds the IPv4 address.
_NAT64_LOCAL: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # RFC 4291
_IPV4_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")  # RFC 4291, deprecated
_IPV4_TRANSLATED: Final = ipaddress.IPv6Network("::ffff:0:0:0/96")  # RFC 2765
_IPV4_MASK: Final = 2**32 - 1


class EventType(StrEnum):
    """Event of a batch, by OpenAI's names."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"


class WebhookUrlError(CloisterError):
    """A URL that webhooks must not be sent to. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A webhook endpoint, without its secret. ``created_at`` is aware."""

    id: str
    name: str
    url: str
    events: list[str]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A row of ``webhook_deliveries`` with the URL and secret of its endpoint.

    Attributes:
        event_id: the id of the message, the same at each attempt.
        endpoint_id: the endpoint.
        batch_id: the batch that ended.
        type: an ``EventType``.
        created_at: when the batch ended; aware.
        attempts: how often it was sent, this attempt included.
        url: the endpoint's URL.
        secret: the endpoint's signing secret, encrypted as it is stored.
    """

    event_id: str
    endpoint_id: str
    batch_id: str
    type: str
    created_at: datetime
    attempts: int
    url: str
    secret: str


def check_url(url: str, networks: Collection[IpNetwork] = ()) -> None:
    """Refuse a URL that is invalid, as far as this is known without resolving its host.

    Args:
        url: the URL.
        networks: see ``check_address``.

    Raises:
        WebhookUrlError: not http or https, no host, with credentials, too long, or an address that is refused.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise WebhookUrlError(f"the URL cannot be read: {error}. Give one like https://host/path") from error
    if parts.scheme not in {"http", "https"} or not host:
        raise WebhookUrlError("the URL must start with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise WebhookUrlError(
            "the URL must hold no user name or password; verify the signature of each message instead"
        )
    if len(url) > MAX_URL_LENGTH or not url.isascii() or not url.isprintable() or " " in url:
        raise WebhookUrlError(f"the URL must be at most {MAX_URL_LENGTH} printable ASCII characters, without spaces")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return  # a host name: its addresses are checked at each delivery
    check_address(address, networks)


def check_address(address: IpAddress, networks: Collection[IpNetwork] = ()) -> None:
    """Refuse an address that webhooks must not be sent to, and an IPv6 address that leads to such an IPv4 address.

    Args:
        address: the address.
        networks: networks of the operator's own receivers, besides public addresses. They never allow the addresses at
            which clouds hand out credentials.

    Raises:
        WebhookUrlError: the address of a cloud's metadata service, of no single host, or neither public nor in
            ``networks``.
    """
    for each in (address, *_embedded(address)):
        if any(each in network for network in _METADATA):
            raise WebhookUrlError(
                f"the address {address} is link-local or of a metadata service: cloud machines get their credentials "
                "there. Give the URL of a host with another address"
            )
        is_reserved = each.version == 4 and each.is_reserved  # noqa: PLR2004 - of IPv6, it holds forms that embed IPv4
        if each.is_multicast or each.is_unspecified or is_reserved or each in _NAT64_LOCAL:
            raise WebhookUrlError(f"the address {address} is of no single host. Give the URL of a host")
    targets = _embedded(address) or (address,)
    if not all(_is_public(target) or any(target in network for network in networks) for target in targets):
        raise WebhookUrlError(
            f"the address {address} is not public. Give the URL of a public host, or let the operator add the "
            "receiver's network to the stack: network.webhook_networks or CLOISTER_WEBHOOK_NETWORKS"
        )


def _is_public(address: IpAddress) -> bool:
    return address.is_global and (address.version == 4 or address in _GLOBAL_UNICAST)  # noqa: PLR2004


def _embedded(address: IpAddress) -> tuple[IpAddress, ...]:
    """Return the IPv4 addresses to which the network may send packets for an IPv6 address; empty for none.

    ::1 and :: have the IPv4-compatible form, and none.
    """
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback or address.is_unspecified:
        return ()
    if address.ipv4_mapped or address.sixtofour:
        return (address.ipv4_mapped or address.sixtofour,)  # type: ignore[return-value]
    if address.teredo:
        return address.teredo
    if any(address in network for network in (_NAT64, _IPV4_COMPATIBLE, _IPV4_TRANSLATED)):
        return (ipaddress.IPv4Address(int(address) & _IPV4_MASK),)
    return ()


def sign_message(delivery: Delivery, secret: str, now: datetime) -> tuple[bytes, dict[str, str]]:
    """Return content and headers of the signed message of a delivery. Content and id are the same at each attempt.

    Args:
        delivery: the delivery.
        secret: the endpoint's signing secret in clear text.
        now: aware, UTC. Receivers refuse messages that were signed more than five minutes ago.
    """
    event_id = delivery.event_id
    content = orjson.dumps(
        {
            "id": event_id,
            "object": "event",
            "created_at": int(delivery.created_at.timestamp()),
            "type": delivery.type,
            "data": {"id": delivery.batch_id},
        }
    )
    signature = Webhook(secret).sign(event_id, now, content.decode())
    return content, {
        "content-type": "application/json",
        "user-agent": "cloister",
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": signature,
    }


def next_try(created_at: datetime, attempts: int, now: datetime) -> datetime | None:
    """Return when to retry after ``attempts`` failures: 5 s later, 10 s, 20 s, … at most 4 h. None to give up.

    The pause varies by a fifth, so that deliveries that failed together are not retried together.
    """
    pause_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** min(attempts - 1, 20))
    following = now + timedelta(seconds=pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
    return following if following < created_at + GIVEN_UP_AFTER else None


def create_endpoint(
    pool: Pool,
    keys: MultiFernet | None,
    *,
    project_id: str,
    url: str,
    events: Collection[EventType],
    name: str,
    actor: Actor,
    networks: Collection[IpNetwork] = (),
) -> tuple[Endpoint, str]:
    """Create an endpoint; return it and its signing secret of 256 random bits, which is not shown again.

    Args:
        pool: the database, which gets the secret encrypted.
        keys: see ``service.stored_secrets``.
        project_id: the project whose batches it reports.
        url: where messages are posted.
        events: what it reports.
        name: a name for listings.
        actor: who creates it, for the audit log.
        networks: see ``check_url``.

    Raises:
        SettingsError: there are no keys.
        WebhookUrlError: see ``check_url``.
    """
    check_url(url, networks)
    secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"  # the form of Standard Webhooks
    values = {
        "id": f"we_{secrets.token_hex(12)}",
        "project_id": project_id,
        "name": name,
        "url": url,
        "secret": encrypt(keys, secret),
        "events": [event.value for event in EventType if event in events],
        **actor.values(),
    }
    with pool.connection() as connection:
        row = connection.execute(query("insert_webhook_endpoint"), values).fetchone()
    assert row is not None  # noqa: S101 - INSERT … RETURNING returns a row
    return Endpoint(**row), secret


def find_endpoint(pool: Pool, *, project_id: str, endpoint_id: str) -> Endpoint | None:
    """Return an endpoint of a project, or None if the project has no such endpoint."""
    with pool.connection() as connection:
        row = connection.execute(
            query("webhook_endpoint_by_id"), {"id": endpoint_id, "project_id": project_id}
        ).fetchone()
    return None if row is None else Endpoint(**row)


def list_endpoints(
    pool: Pool, *, project_id: str, limit: int | None = None, after: str | None = None
) -> list[Endpoint]:
    """Return a project's endpoints, the newest first, starting behind the endpoint ``after``."""
    values = {"project_id": project_id, "limit": limit, "after": after}
    with pool.connection() as connection:
        return [Endpoint(**row) for row in connection.execute(query("list_webhook_endpoints"), values)]


def delete_endpoint(pool: Pool, *, project_id: str | None, endpoint_id: str, actor: Actor) -> bool:
    """Delete an endpoint of a project, or of any project if None; return False if it does not exist."""
    values = {"id": endpoint_id, "project_id": project_id, **actor.values()}
    with pool.connection() as connection:
        return connection.execute(query("delete_webhook_endpoint"), values).fetchone() is not None
