"""Ports of this machine's loopback: free ones, and whether a server answers on one."""

import socket
import ssl
from collections.abc import Callable
from typing import Final

import httpx

LOOPBACK: Final = "127.0.0.1"


def free_ports(number: int) -> list[int]:
    """As many different TCP ports that nothing listens on now."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def answers(url: str) -> Callable[[], bool]:
    """Asks whether a URL on this machine answers with 200; whose certificate it has is of no interest."""
    context = _unverified()

    def ask() -> bool:
        try:
            return httpx.get(url, verify=context, trust_env=False, timeout=2).is_success
        except httpx.TransportError:
            return False

    return ask


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
