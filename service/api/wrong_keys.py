"""Limit of wrong API keys for each client address, so that guessing costs the database nothing."""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from threading import Lock
from typing import Final

from service.api_keys import digests_of_valid_keys, key_digest
from service.db import Pool
from service.errors import RateLimitError

MAX_WRONG_KEYS: Final = 20
WINDOW_S: Final = 60.0
# A provider gives each customer at least one such network, so a client can choose any address in it.
_IPV6_NETWORK_BITS: Final = 64
_MAX_ADDRESSES: Final = 10_000
_DIGESTS_VALID_S: Final = 1.0


class WrongKeys:
    """The wrong keys that clients have sent lately, by address. It is safe to use from several threads.

    An address that has sent many is refused, except with a valid key: the digests of all valid keys are read at most
    once per second while any address is refused. They only decide whether a key is worth a query. Access is always
    granted by the database, so a revoked key never lives longer.

    Args:
        pool: the database of the keys.
        limit: wrong keys that an address may send in a minute.
        clock: returns monotonic seconds.
        max_lifetime: see ``service.api_keys.authenticate``.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        limit: int = MAX_WRONG_KEYS,
        clock: Callable[[], float] = time.monotonic,
        max_lifetime: timedelta | None = None,
    ) -> None:
        self._pool = pool
        self._max_lifetime = max_lifetime
        self._limit = limit
        self._clock = clock
        # By address, the end of its minute and its wrong keys. The oldest minute comes first; forgetting it bounds the
        # memory.
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._digests: frozenset[bytes] = frozenset()
        self._digests_due = -math.inf
        self._lock = Lock()
        self._reading = Lock()

    def refusal(self, address: str, key: str) -> RateLimitError | None:
        """Return the reason why a key is not checked at all, or None.

        Args:
            address: the client's IP address; empty if it has none.
            key: the key that it sent.

        Raises:
            psycopg.OperationalError: the database is unreachable.
        """
        with self._lock:
            ends_at, count = self._counts.get(client_network(address), (-math.inf, 0))
        now = self._clock()
        if now >= ends_at or count < self._limit or key_digest(key)[:8] in self._valid_digests():
            return None
        return RateLimitError(
            "Too many requests with an incorrect API key came from your network address. Check the key, and try again "
            "in a minute. Correct keys still work.",
            code="rate_limit_exceeded",
            # The official client would otherwise sleep and send the same key again.
            headers={"retry-after": str(max(1, math.ceil(ends_at - now))), "x-should-retry": "false"},
        )

    def count(self, address: str) -> None:
        """Count a wrong key of an address."""
        network = client_network(address)
        with self._lock:
            now = self._clock()
            ends_at, count = self._counts.get(network, (-math.inf, 0))
            if now >= ends_at:
                self._counts.pop(network, None)
                ends_at, count = now + WINDOW_S, 0
            self._counts[network] = (ends_at, count + 1)
            if len(self._counts) > _MAX_ADDRESSES:
                self._counts.popitem(last=False)

    def _valid_digests(self) -> frozenset[bytes]:
        # One thread reads them; the others wait for it, or they would refuse valid keys.
        with self._reading:
            if self._clock() >= self._digests_due:
                self._digests = digests_of_valid_keys(self._pool, self._max_lifetime)
                self._digests_due = self._clock() + _DIGESTS_VALID_S
            return self._digests


def client_network(address: str) -> str:
    """Return what a client cannot change of its address: an IPv4 address, or the first half of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed.ipv4_mapped or ipaddress.ip_network((int(parsed), _IPV6_NETWORK_BITS), strict=False))
    return str(parsed)
