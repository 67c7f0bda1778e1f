"""Ports of this machine's loopback: free ones, and whether a server answers on one."""

import secrets
import socket
import ssl
from collections.abc import Callable
from typing import Final

import httpx

LOOPBACK: Final = "127.0.0.1"
# Linux gives 32768 to 60999 unless it is told otherwise.
_NEVER_GIVEN: Final = range(20_000, 32_000)


def free_ports(number: int) -> list[int]:
    """As many different TCP ports that nothing listens on now.

    They are used some seconds later: so none is among those that the kernel gives to whoever asks for any port.
    """
    found: list[int] = []
    while len(found) < number:
        port = secrets.choice(_NEVER_GIVEN)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True


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
