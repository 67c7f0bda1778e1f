"""Delivers webhooks, at least once each: to the endpoints of a project when one of its batches has ended.

A delivery is claimed for a minute, sent, and then noted. Whoever dies in between leaves it due again after that
minute; it comes with the same id, by which a receiver tells that it had it already.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, Final

import httpx
import psycopg
import structlog

from service.db import query
from service.reconciler.context import Context, utc_now
from service.webhooks import WebhookUrlError, check_address, check_url, message, next_try

logger = structlog.get_logger(__name__)

TIMEOUT_S: Final = 10.0
_POLL_INTERVAL_S: Final = 0.5
_BUSY_INTERVAL_S: Final = 0.05
_PAUSE_S: Final = 5.0
_LEASE_S: Final = 60
# At most one of them is held by a single endpoint.
_SENDERS: Final = 8

Delivery = Mapping[str, Any]


class _RefusedError(Exception):
    """The receiver did not take the message; says what it answered."""


def keep_delivering(context: Context, over: Event) -> None:
    """Delivers what is due until ``over`` is set, then waits for what is being sent."""
    sending: dict[str, Future[None]] = {}
    # The system's certificates, or those in SSL_CERT_FILE: a private stack often has an authority of its own.
    trust = ssl.create_default_context()
    with ThreadPoolExecutor(max_workers=_SENDERS, thread_name_prefix="webhook") as executor:
        while not over.is_set():
            sending = {endpoint: future for endpoint, future in sending.items() if not future.done()}
            try:
                claimed = _claim(context, busy=list(sending))
            except Exception as error:  # noqa: BLE001 - the shell of a thread: tried again after a while
                event = logger.warning if isinstance(error, psycopg.OperationalError) else logger.exception
                event("webhook.claim_failed", error=str(error).strip())
                over.wait(_PAUSE_S)
                continue
            for delivery in claimed:
                sending[delivery["endpoint_id"]] = executor.submit(_deliver_safely, context, delivery, trust)
            over.wait(_BUSY_INTERVAL_S if sending else _POLL_INTERVAL_S)


def _claim(context: Context, *, busy: list[str]) -> list[dict[str, Any]]:
    if len(busy) >= _SENDERS:
        return []
    values = {"busy": busy, "limit": _SENDERS - len(busy), "lease_s": _LEASE_S}
    with context.pool.connection() as connection:
        return connection.execute(query("claim_deliveries"), values).fetchall()


def _deliver_safely(context: Context, delivery: Delivery, trust: ssl.SSLContext) -> None:
    try:
        deliver(context, delivery, trust)
    except Exception as error:  # noqa: BLE001 - the shell of a thread: due again when the lease ends
        is_transient = isinstance(error, psycopg.OperationalError)
        event = logger.warning if is_transient else logger.exception
        event("webhook.not_noted", event_id=delivery["event_id"], error=str(error))


def deliver(context: Context, delivery: Delivery, trust: ssl.SSLContext) -> None:
    """Sends one message and notes what came of it: delivered, to be tried again, or given up.

    Raises:
        psycopg.OperationalError: it could not be noted; it will be sent again.
    """
    key = {"event_id": delivery["event_id"], "endpoint_id": delivery["endpoint_id"]}
    told = {**key, "batch_id": delivery["batch_id"], "attempt": delivery["attempts"]}
    try:
        asyncio.run(_post(delivery, trust))
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, WebhookUrlError, _RefusedError) as error:
        problem = str(error) or f"no answer within {TIMEOUT_S:.0f} s"
    else:
        with context.pool.connection() as connection:
            connection.execute(query("delivery_succeeded"), key)
        logger.info("webhook.delivered", **told)
        context.metrics.deliveries.labels(outcome="delivered").inc()
        return
    now = utc_now()
    due_at = next_try(delivery["created_at"], delivery["attempts"], now)
    with context.pool.connection() as connection:
        connection.execute(query("delivery_failed"), {**key, "due_at": due_at, "error": problem[:500]})
    outcome = "failed" if due_at else "given_up"
    logger.warning("webhook.failed", **told, error=problem, next_try_at=due_at and due_at.isoformat())
    context.metrics.deliveries.labels(outcome=outcome).inc()


async def _post(delivery: Delivery, trust: ssl.SSLContext) -> None:
    check_url(delivery["url"])
    signed = message(delivery, utc_now())
    # One limit on all of it: a receiver that sends a byte now and then must not hold a thread.
    async with asyncio.timeout(TIMEOUT_S):
        url = httpx.URL(delivery["url"])
        address = await _address(url)
        async with (
            httpx.AsyncClient(verify=trust, trust_env=False, follow_redirects=False, timeout=TIMEOUT_S) as client,
            client.stream(
                "POST",
                # To the address that was checked: the name might lead elsewhere when it is looked up again.
                url.copy_with(host=address),
                content=signed.content,
                headers={**signed.headers, "host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            if not response.is_success:
                raise _RefusedError(f"answered {response.status_code}")


async def _address(url: httpx.URL) -> str:
    """The first address of the URL's host; all of them must be allowed."""
    port = url.port or (443 if url.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    addresses = [str(sockaddr[0]) for *_, sockaddr in found]
    for address in addresses:
        check_address(ipaddress.ip_address(address.partition("%")[0]))
    return addresses[0]
