"""Ports on this machine's loopback interface: checks whether a server answers."""

import ssl
from collections.abc import Callable
from typing import Final

import httpx

LOOPBACK: Final = "127.0.0.1"


def answers(url: str) -> Callable[[], bool]:
    """Return a check whether a URL on this machine answers with a success status; certificates are not verified."""
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
