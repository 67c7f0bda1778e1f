"""Connections from inside a pod. The doctor sends this file to Python in a pod: standard library only.

serve PORT              accept connections until the end of the pod
connect JSON            try connections, and print one JSON object; see ``connect_all``
"""

import json
import os
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime

_TIMEOUT_S = 3.0
_CA_FILE = "/cluster-ca/ca.crt"
# getaddrinfo has no time limit; a resolver that does not answer takes longer.
_NAME_TIMEOUT_S = 6.0


def connect(host: str, port: int) -> dict[str, object]:
    """Try one TCP connection. No data is sent.

    Returns:
        ``found``: ``open``, ``refused``, ``no answer``, ``unreachable`` or ``no address``; ``address``; ``seconds``.
    """
    started, address, found = time.monotonic(), "", "no address"
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        socket.create_connection((address, port), timeout=_TIMEOUT_S).close()
        found = "open"
    except (socket.gaierror, UnicodeError):
        pass
    except TimeoutError:
        found = "no answer"
    except ConnectionRefusedError:
        found = "refused"
    except OSError:
        found = "unreachable"
    return {"found": found, "address": address, "seconds": round(time.monotonic() - started, 2)}


def clock_skew(host: str, port: int) -> float | None:
    """Return how far this clock is ahead of a server's ``Date`` header, in seconds; None without an answer."""
    try:
        context = ssl.create_default_context(cafile=_CA_FILE)
        with urllib.request.urlopen(f"https://{host}:{port}/version", timeout=_TIMEOUT_S, context=context) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:
        date = error.headers["Date"]
    except OSError:
        return None
    # The header has whole seconds.
    return time.time() - parsedate_to_datetime(date).timestamp() - 0.5 if date else None


def connect_all(request: dict[str, list[list[object]]]) -> dict[str, object]:
    """Try all connections at once.

    Args:
        request: ``targets``, host and port of each connection; ``clock``, host and port of the API server, or empty.

    Returns:
        ``results`` in the order of the targets, and ``skew_s``.
    """
    unfinished = {"found": "no address", "address": "", "seconds": _NAME_TIMEOUT_S}
    results: list[dict[str, object]] = [dict(unfinished) for _ in request["targets"]]

    def run(index: int, host: str, port: int) -> None:
        results[index] = connect(host, port)

    targets = [(str(host), int(str(port))) for host, port in request["targets"]]
    threads = [threading.Thread(target=run, args=(index, *target), daemon=True) for index, target in enumerate(targets)]
    for each in threads:
        each.start()
    skew = next((clock_skew(str(host), int(str(port))) for host, port in request["clock"]), None)
    end = time.monotonic() + _TIMEOUT_S + _NAME_TIMEOUT_S
    for each in threads:
        each.join(max(0.0, end - time.monotonic()))
    return {"results": results, "skew_s": skew}


def serve(port: int) -> None:
    """Accept connections, of IPv6 too where the pod has it, until the process is killed."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=is_dual) as server:
        while True:
            server.accept()[0].close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        print(json.dumps(connect_all(json.loads(sys.argv[2]))), flush=True)
        os._exit(0)  # threads that still resolve a name would hold the process
