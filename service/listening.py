"""Addresses that servers listen on: one, or ``::`` for all addresses of this machine, IPv4 and IPv6."""

import socket
from typing import Final

ALL_ADDRESSES: Final = "::"


def asyncio_host(host: str) -> str:
    """Return the host for a server of asyncio, such as uvicorn.

    asyncio binds ``::`` to IPv6 only, and an empty host to both families
    (https://docs.python.org/3/library/asyncio-eventloop.html#asyncio.loop.create_server).
    """
    return "" if host == ALL_ADDRESSES else host


def socket_host(host: str) -> str:
    """Return the host for a server with one socket: ``0.0.0.0`` instead of ``::`` on a machine without IPv6.

    On Linux, a socket at ``::`` accepts IPv4 too unless ``net.ipv6.bindv6only`` is set
    (https://man7.org/linux/man-pages/man7/ipv6.7.html).
    """
    has_ipv6 = host != ALL_ADDRESSES or socket.has_dualstack_ipv6()
    return host if has_ipv6 else "0.0.0.0"  # noqa: S104 - the same addresses
