"""Malformed requests: each is refused in OpenAI's envelope, and none causes a 5xx."""

import socket
from urllib.parse import urlsplit

import httpx
import pytest

DEEP = b"[" * 100_000


def field(names: str) -> bytes:
    """A form with one field whose value is not UTF-8."""
    return f"--a\r\ncontent-disposition: form-data; {names}\r\n\r\n\xff\xfe\r\n--a--\r\n".encode("latin-1")


@pytest.mark.parametrize(
    "query",
    ["limit=" + "9" * 30, "limit=-" + "9" * 30, "limit=1e3", "limit=", "limit=%00", "after=%00", "after=" + "x" * 5_000,
     "after=%ff%fe", "limit=1&limit=2", "order=%F0%9F%92%A9", "purpose=%00", "after=%ED%A0%80"],
)  # fmt: skip
def test_odd_query_is_answered(http: httpx.Client, query: str) -> None:
    for path in ("/v1/files", "/v1/batches"):
        assert http.get(f"{path}?{query}").status_code in {200, 400}


@pytest.mark.parametrize("path", ["files", "batches", "models"])
@pytest.mark.parametrize("name", ["%00", "%ff", "..%2f..", "x" * 5_000, "%0d%0aset-cookie:a", "'--", "%F0%9F%92%A9"])
def test_odd_id_is_not_found_or_refused(http: httpx.Client, path: str, name: str) -> None:
    answer = http.get(f"/v1/{path}/{name}")
    assert answer.status_code in {400, 404}
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", DEEP, b"\xff\xfe", b"\0", b'{"a":' * 10_000, b"1" * 5_000, b'{"a":1e999999}']
)
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/webhook_endpoints"])
def test_odd_json_body_is_refused(http: httpx.Client, admin_key: str, path: str, body: bytes) -> None:
    if "webhook" in path:
        http.headers["authorization"] = f"Bearer {admin_key}"
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=", b"x"),
        ("multipart/form-data; boundary=a", b""),
        ("multipart/form-data; boundary=a", b"--a\r\n\r\n"),
        ("multipart/form-data; boundary=a", b"--a\r\ncontent-disposition: form-data\r\n\r\nx\r\n--a--\r\n"),
        ("multipart/form-data; boundary=" + "a" * 5_000, b"--a\r\n"),
        ("multipart/form-data; boundary=a; charset=none", field('name="file"; filename="\xff"')),
        ("multipart/form-data; boundary=a", field('name="purpose"')),
        ("application/x-www-form-urlencoded", b"purpose=batch"),
        ("\xff", b"x"),
    ],
)  # fmt: skip
def test_odd_form_is_refused(http: httpx.Client, content_type: str, body: bytes) -> None:
    answer = http.post("/v1/files", content=body, headers={"content-type": content_type.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "value", [b"Bearer \xff\xfe", b"Bearer " + b"x" * 8_000, b"bearer\ta", b"\xf0\x9f\x92\xa9", b"Bearer \xed\xa0\x80"]
)
def test_odd_key_is_refused(base_url: str, value: bytes) -> None:
    answer = httpx.get(f"{base_url}/v1/files", headers={"authorization": value})  # type: ignore[dict-item]
    assert answer.status_code == 401


@pytest.mark.parametrize("name", ["idempotency-key", "x-stainless-retry-count", "last-event-id", "content-type"])
@pytest.mark.parametrize("value", [b"\xff", b"9" * 5_000, b"\xc2\xb2", b"-1", b""])
def test_odd_headers_cause_no_server_error(http: httpx.Client, name: str, value: bytes) -> None:
    body = b'{"input_file_id":"f","endpoint":"/v1/completions","completion_window":"24h"}'
    answer = http.post("/v1/batches", content=body, headers={name: value})  # type: ignore[dict-item]
    assert answer.status_code in {200, 400}


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/webhook_endpoints", "/v1/batches/batch_1/cancel"])
def test_oversized_body_is_refused(http: httpx.Client, admin_key: str, path: str) -> None:
    if "webhook" in path:
        http.headers["authorization"] = f"Bearer {admin_key}"
    # Without Content-Length the size is known only after reading.
    answer = http.post(path, content=iter([b"[" * (1 << 20)] * 5), headers={"content-type": "application/json"})
    assert answer.status_code == (404 if "cancel" in path else 413)  # a body that the route does not take is not read
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_non_http_input_is_refused(base_url: str) -> None:
    where = urlsplit(base_url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03 TLS by mistake\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
