"""Delivery of webhooks, at least once each, to the endpoints of a project whose batch has ended.

A delivery is claimed for a minute, sent, and then recorded. If the process dies in between, the delivery is due again
after that minute. It carries the same id, by which a receiver recognizes a repeated delivery.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Event
from typing import Final

import httpx
import psycopg
import structlog
from psycopg.rows import class_row

from service.db import query
from service.errors import CloisterError
from service.logging import error_text
from service.reconciler.backends import Backends
from service.stored_secrets import decrypt
from service.webhooks import Delivery, IpNetwork, check_address, check_url, next_try, sign_message

logger = structlog.get_logger(__name__)

TIMEOUT_S: Final = 10.0
_POLL_INTERVAL_S: Final = 0.5
_BUSY_INTERVAL_S: Final = 0.05
_PAUSE_S: Final = 5.0
_LEASE_S: Final = 60
# A single endpoint holds at most one of these threads.
_SENDERS: Final = 8


def keep_delivering(backends: Backends, over: Event) -> None:
    """Deliver what is due until ``over`` is set, then wait for the deliveries in progress."""
    sending: dict[str, Future[None]] = {}
    # The system's certificates, or those in SSL_CERT_FILE: a private stack often has its own authority.
    trust = ssl.create_default_context()

    def deliver_safely(delivery: Delivery) -> None:
        try:
            deliver(backends, delivery, trust)
        except Exception as error:  # noqa: BLE001 - the shell of a thread: due again when the lease ends
            is_transient = isinstance(error, psycopg.OperationalError)
            log = logger.warning if is_transient else logger.exception
            log("webhook.not_recorded", event_id=delivery.event_id, error=error_text(error))

    with ThreadPoolExecutor(max_workers=_SENDERS, thread_name_prefix="webhook") as executor:
        while not over.is_set():
            sending = {endpoint: future for endpoint, future in sending.items() if not future.done()}
            claimed: list[Delivery] = []
            if len(sending) < _SENDERS:
                values = {"busy": list(sending), "limit": _SENDERS - len(sending), "lease_s": _LEASE_S}
                try:
                    with (
                        backends.pool.connection() as connection,
                        connection.cursor(row_factory=class_row(Delivery)) as cursor,
                    ):
                        claimed = cursor.execute(query("claim_deliveries"), values).fetchall()
                except Exception as error:  # noqa: BLE001 - the shell of a thread: retried after a pause
                    log = logger.warning if isinstance(error, psycopg.OperationalError) else logger.exception
                    log("webhook.claim_failed", error=error_text(error))
                    over.wait(_PAUSE_S)
                    continue
            for delivery in claimed:
                sending[delivery.endpoint_id] = executor.submit(deliver_safely, delivery)
            over.wait(_BUSY_INTERVAL_S if sending else _POLL_INTERVAL_S)


def deliver(backends: Backends, delivery: Delivery, trust: ssl.SSLContext) -> None:
    """Send one message and record the outcome: delivered, to be retried, or given up.

    Raises:
        psycopg.OperationalError: the outcome could not be recorded; the message will be sent again.
    """
    key = {"event_id": delivery.event_id, "endpoint_id": delivery.endpoint_id}
    facts = {**key, "batch_id": delivery.batch_id, "attempt": delivery.attempts}
    try:
        secret = decrypt(backends.encryption_keys, delivery.secret)
        asyncio.run(_post(delivery, secret, trust, backends.webhook_networks))
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, CloisterError) as error:
        problem = str(error) or f"no answer within {TIMEOUT_S:.0f} s"
    else:
        with backends.pool.connection() as connection:
            connection.execute(query("delivery_succeeded"), key)
        logger.info("webhook.delivered", **facts)
        backends.metrics.deliveries.labels(outcome="delivered").inc()
        return
    due_at = next_try(delivery.created_at, delivery.attempts, datetime.now(UTC))
    with backends.pool.connection() as connection:
        connection.execute(query("delivery_failed"), {**key, "due_at": due_at, "error": problem[:500]})
    outcome = "failed" if due_at else "given_up"
    logger.warning("webhook.failed", **facts, error=problem, next_try_at=due_at and due_at.isoformat())
    backends.metrics.deliveries.labels(outcome=outcome).inc()


async def _post(delivery: Delivery, secret: str, trust: ssl.SSLContext, networks: Collection[IpNetwork]) -> None:
    check_url(delivery.url, networks)
    content, headers = sign_message(delivery, secret, datetime.now(UTC))
    # One limit for everything: a receiver that sends a byte now and then must not hold a thread.
    async with asyncio.timeout(TIMEOUT_S):
        url = httpx.URL(delivery.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        for address in addresses:
            check_address(ipaddress.ip_address(address.partition("%")[0]), networks)
        async with (
            httpx.AsyncClient(verify=trust, trust_env=False, follow_redirects=False, timeout=TIMEOUT_S) as client,
            client.stream(
                "POST",
                # To an address that was checked: the name could resolve to another one by now.
                url.copy_with(host=addresses[0]),
                content=content,
                headers={**headers, "host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            if not response.is_success:
                raise httpx.HTTPError(f"answered {response.status_code}")
