"""Webhooks that a client points at the inside of the network: the service must not connect to it."""

import ipaddress
import socket
from dataclasses import replace
from typing import Any

import pytest

from service.webhooks import WebhookUrlError, check_address, check_url
from tests.integration.reconciler_harness import Stack, eventually
from tests.integration.test_webhook_deliveries import (
    Receiver,
    cancel_one,
    deliveries,
    delivering,
    receiver,
    receiving,
    subscribe,
)

__all__ = ["receiver"]  # a fixture

EVERYWHERE = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
PRIVATE = (ipaddress.ip_network("10.40.0.0/16"), ipaddress.ip_network("fd12::/16"))

METADATA = [
    "169.254.169.254",  # AWS, Azure, Google Cloud, Oracle Cloud, OpenStack
    "169.254.170.2",  # AWS ECS
    "100.100.100.200",  # Alibaba Cloud
    "192.0.0.192",  # Oracle Cloud
    "168.63.129.16",  # Azure
    "fd00:ec2::254",  # AWS
    "fd00:ec2::23",  # AWS EKS
    "fd00:c1::a9fe:a9fe",  # Oracle Cloud
    "fd20:ce::254",  # Google Cloud
    "fe80::a9fe:a9fe",
]
EMBEDDED_METADATA = [
    "::ffff:169.254.169.254",
    "::a9fe:a9fe",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::a83f:8110",  # 168.63.129.16
    "2002:a9fe:a9fe::1",
    "2001:0:0808:0808:0:0:5601:5601",  # Teredo, of the client 169.254.169.254
]
INTERNAL = [
    "127.0.0.1",
    "127.8.8.8",
    "10.0.0.7",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "::1",
    "fd12:1::1",
    "fec0::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:0:127.0.0.1",
    "::7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:7",
    "64:ff9b:1::a00:7",
    "64:ff9b:1:ffff::8.8.8.8",
    "2002:7f00:1::",
    "2002:a00:7::1",
    "2001:0:0808:0808:0:0:f5ff:fff8",  # Teredo, of the client 10.0.0.7
    "2001:0:a00:7:0:0:f7f7:f7f7",  # Teredo, of the server 10.0.0.7
]
NO_HOST = ["0.0.0.0", "::", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1", "ff02::1", "ff0e::1"]  # noqa: S104 - refused


@pytest.mark.parametrize("address", [*METADATA, *EMBEDDED_METADATA, *INTERNAL, *NO_HOST])
def test_address_inside_the_network_is_refused(address: str) -> None:
    with pytest.raises(WebhookUrlError, match=r"webhook_networks|credentials|no single host"):
        check_address(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(WebhookUrlError):
        check_url(f"http://{host}/hook")


@pytest.mark.parametrize("address", [*METADATA, *EMBEDDED_METADATA, *NO_HOST])
def test_metadata_service_is_refused_in_networks_of_the_operator(address: str) -> None:
    with pytest.raises(WebhookUrlError):
        check_address(ipaddress.ip_address(address), EVERYWHERE)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_public_address_is_accepted(address: str) -> None:
    check_address(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["10.40.0.9", "fd12::9", "::ffff:10.40.0.9"])
def test_receiver_in_the_networks_of_the_operator_is_accepted(address: str) -> None:
    check_address(ipaddress.ip_address(address), PRIVATE)
    with pytest.raises(WebhookUrlError):
        check_address(ipaddress.ip_address("10.41.0.9"), PRIVATE)


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f000001", "017700000001"])
def test_name_of_an_internal_address_gets_no_message(stack: Stack, receiver: Receiver, host: str) -> None:
    stack.backends = replace(stack.backends, webhook_networks=())
    subscribe(stack, receiver.url.replace("localhost", host))
    cancel_one(stack)
    with delivering(stack):
        eventually(lambda: deliveries(stack)[0]["last_error"] is not None)
    assert "is not public" in deliveries(stack)[0]["last_error"]
    assert receiver.got == []


def test_name_that_changes_its_address_after_the_check_is_not_resolved_again(
    stack: Stack, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as internal:
        port = int(receiver.url.split(":")[2].split("/")[0])
        resolved: list[Any] = []
        resolve = socket.getaddrinfo

        def rebinding(host: Any, *args: Any, **options: Any) -> Any:
            if host != "rebinding.example":
                return resolve(host, *args, **options)
            resolved.append(host)
            target = port if len(resolved) == 1 else int(internal.url.split(":")[2].split("/")[0])
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", target))]

        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        subscribe(stack, f"http://rebinding.example:{port}/hook")
        cancel_one(stack)
        with delivering(stack):
            eventually(lambda: deliveries(stack)[0]["delivered_at"] is not None)
        assert (len(resolved), len(receiver.got), internal.got) == (1, 1, [])


@pytest.mark.parametrize("others", [["10.0.0.7"], ["169.254.169.254"], ["fd12::9"]])
def test_name_with_one_forbidden_address_gets_no_message(
    stack: Stack, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    def resolve(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ["127.0.0.1", *others]]

    subscribe(stack, receiver.url.replace("localhost", "mixed.example"))
    cancel_one(stack)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with delivering(stack):
        eventually(lambda: deliveries(stack)[0]["last_error"] is not None)
    assert receiver.got == []
