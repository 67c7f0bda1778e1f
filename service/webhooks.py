"""Webhook endpoints: where a project wants to hear of the end of its batches, and how each message is signed.

Messages and signatures follow Standard Webhooks, as OpenAI's do: the official client verifies them with
``client.webhooks.unwrap``. Sources: https://www.standardwebhooks.com and
https://platform.openai.com/docs/guides/webhooks.
"""

import base64
import ipaddress
import random
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from standardwebhooks import Webhook

from service.db import Pool, query
from service.errors import CloisterError

MAX_URL_LENGTH: Final = 2_048

# As long as OpenAI tries.
GIVEN_UP_AFTER: Final = timedelta(hours=72)
_FIRST_RETRY_S: Final = 5
_MAX_RETRY_S: Final = 4 * 3600

# From link-local addresses a cloud tells each machine who asks its credentials; whoever may name a URL must not make
# the service speak to them. fd00:ec2::254 is AWS' own, outside of fe80::/10. Other private addresses are what most
# receivers beside a private stack have.
_AWS_METADATA: Final = ipaddress.ip_address("fd00:ec2::254")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class EventType(StrEnum):
    """OpenAI's names of what can be told about a batch."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"


class WebhookUrlError(CloisterError):
    """A URL that no webhook is sent to; the message says why and what to give instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A webhook endpoint without its secret; ``created_at`` is aware."""

    id: str
    name: str
    url: str
    events: list[str]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is posted, byte for byte, and with which headers."""

    content: bytes
    headers: Mapping[str, str]


def check_url(url: str) -> None:
    """Refuses a URL that can be told to be wrong without a lookup of its host.

    Raises:
        WebhookUrlError: not http or https, no host, with credentials, too long, or a link-local address.
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
        return  # a name: its addresses are checked each time when it is sent to
    check_address(address)


def check_address(address: IpAddress) -> None:
    """Refuses an address that a webhook must not be sent to.

    Raises:
        WebhookUrlError: a link-local address.
    """
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address.is_link_local or address == _AWS_METADATA:
        raise WebhookUrlError(
            f"the address {address} is link-local: cloud machines get their credentials there. "
            "Give the URL of a host with another address"
        )


def new_secret() -> str:
    """A signing secret of 256 random bits in the form of Standard Webhooks."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


def message(delivery: Mapping[str, Any], now: datetime) -> Message:
    """The signed message of a row of ``webhook_deliveries``: the same content and id at each attempt.

    Args:
        delivery: event_id, type, batch_id, created_at and the endpoint's secret.
        now: aware UTC; receivers refuse what was signed more than five minutes ago.
    """
    event_id: str = delivery["event_id"]
    content = orjson.dumps(
        {
            "id": event_id,
            "object": "event",
            "created_at": int(delivery["created_at"].timestamp()),
            "type": delivery["type"],
            "data": {"id": delivery["batch_id"]},
        }
    )
    signature = Webhook(delivery["secret"]).sign(event_id, now, content.decode())
    return Message(
        content=content,
        headers={
            "content-type": "application/json",
            "user-agent": "cloister",
            "webhook-id": event_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": signature,
        },
    )


def next_try(created_at: datetime, attempts: int, now: datetime) -> datetime | None:
    """When to try again after ``attempts`` failures: 5 s later, 10 s, 20 s, … at most 4 h; None to give up.

    A fifth more or less, so that what failed together does not come back together.
    """
    pause_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** min(attempts - 1, 20))
    following = now + timedelta(seconds=pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
    return following if following < created_at + GIVEN_UP_AFTER else None


def create_endpoint(
    pool: Pool, *, project_id: str, url: str, events: Collection[EventType], name: str, actor: str
) -> tuple[Endpoint, str]:
    """Makes an endpoint; returns it and its secret, which is not shown again.

    Raises:
        WebhookUrlError: see ``check_url``.
    """
    check_url(url)
    secret = new_secret()
    values = {
        "id": f"we_{secrets.token_hex(12)}",
        "project_id": project_id,
        "name": name,
        "url": url,
        "secret": secret,
        "events": [event.value for event in EventType if event in events],
        "actor": actor,
    }
    with pool.connection() as connection:
        row = connection.execute(query("insert_webhook_endpoint"), values).fetchone()
    assert row is not None  # noqa: S101 - INSERT … RETURNING gives a row
    return Endpoint(**row), secret


def find_endpoint(pool: Pool, *, project_id: str, endpoint_id: str) -> Endpoint | None:
    """One endpoint of a project."""
    with pool.connection() as connection:
        row = connection.execute(
            query("webhook_endpoint_by_id"), {"id": endpoint_id, "project_id": project_id}
        ).fetchone()
    return None if row is None else Endpoint(**row)


def list_endpoints(
    pool: Pool, *, project_id: str, limit: int | None = None, after: str | None = None
) -> list[Endpoint]:
    """A project's endpoints, the newest first, from the one that follows ``after``."""
    values = {"project_id": project_id, "limit": limit, "after": after}
    with pool.connection() as connection:
        return [Endpoint(**row) for row in connection.execute(query("list_webhook_endpoints"), values)]


def delete_endpoint(pool: Pool, *, project_id: str | None, endpoint_id: str, actor: str) -> bool:
    """Deletes an endpoint, of this project or of any if None; false when there is none such."""
    values = {"id": endpoint_id, "project_id": project_id, "actor": actor}
    with pool.connection() as connection:
        return connection.execute(query("delete_webhook_endpoint"), values).fetchone() is not None
