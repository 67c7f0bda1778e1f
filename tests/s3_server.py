"""An S3 server in its own process: moto, behind the checks of signatures and times that moto lacks.

Run as ``python -m tests.s3_server PORT``. Source of the limits:
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html and
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

import hashlib
import hmac
import sys
import urllib.parse
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
MAX_SKEW: Final = timedelta(minutes=15)
_TIME: Final = "%Y%m%dT%H%M%SZ"


def s3_accepts(method: str, url: str, now: datetime) -> bool:
    """Return whether S3 accepts a presigned URL, with the secret key of ``CREDENTIALS``."""
    parts = urllib.parse.urlsplit(url)
    query = dict(urllib.parse.parse_qsl(parts.query))
    signature = query.pop("X-Amz-Signature")
    assert (query["X-Amz-Algorithm"], query["X-Amz-SignedHeaders"]) == ("AWS4-HMAC-SHA256", "host")
    _, *scope = query["X-Amz-Credential"].split("/")
    canonical_query = urllib.parse.urlencode(sorted(query.items()), quote_via=urllib.parse.quote, safe="")
    request = [method, parts.path, canonical_query, f"host:{parts.netloc}", "", "host", "UNSIGNED-PAYLOAD"]
    digest = hashlib.sha256("\n".join(request).encode()).hexdigest()
    key = f"AWS4{CREDENTIALS['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in (*scope, "\n".join(["AWS4-HMAC-SHA256", query["X-Amz-Date"], "/".join(scope), digest])):
        key = hmac.digest(key, part.encode(), "sha256")
    signed_at = signing_time(query["X-Amz-Date"])
    is_in_time = signed_at - MAX_SKEW <= now <= signed_at + timedelta(seconds=int(query["X-Amz-Expires"]))
    return hmac.compare_digest(key.hex(), signature) and is_in_time


def signing_time(text: str) -> datetime:
    """Return the time of ``X-Amz-Date``."""
    return datetime.strptime(text, _TIME).replace(tzinfo=UTC)


class _Checked:
    """moto's application. Requests with a signature in their headers are checked for their time only."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        now = datetime.now(UTC)
        if "X-Amz-Signature=" in environ["QUERY_STRING"]:
            url = f"http://{environ['HTTP_HOST']}{environ['RAW_URI']}"
            code = "" if s3_accepts(environ["REQUEST_METHOD"], url, now) else "AccessDenied"
        elif "HTTP_X_AMZ_DATE" in environ:
            code = "" if abs(now - signing_time(environ["HTTP_X_AMZ_DATE"])) < MAX_SKEW else "RequestTimeTooSkewed"
        else:
            code = "AccessDenied"
        if not code:
            return self._moto(environ, start_response)  # type: ignore[no-any-return]
        start_response("403 Forbidden", [("content-type", "application/xml")])
        return [f"<Error><Code>{code}</Code></Error>".encode()]


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    make_server("127.0.0.1", int(sys.argv[1]), _Checked(), threaded=True, request_handler=_Quiet).serve_forever()
