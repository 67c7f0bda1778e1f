"""Connection to the public API with the official client: which server, which key, and readable errors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from service.client.exit_codes import CommandError, ExitCode
from service.local.client_env import Client, read_client_env

if TYPE_CHECKING:
    from openai import OpenAI

# In order of precedence. Both values of a pair come from the same source, so that a key only reaches its own server.
_PAIRS: Final = (("CLOISTER_BASE_URL", "CLOISTER_API_KEY"), ("OPENAI_BASE_URL", "OPENAI_API_KEY"))
_SERVER_ERRORS: Final = 500


def find_server(environment: Mapping[str, str], data_dir: Path | None) -> Client:
    """Return the server that the environment names, or else the ``cloister local`` of a data directory.

    A URL without a path gets ``/v1``.

    Args:
        environment: variables of the process.
        data_dir: the data directory of ``cloister local``; None to use the environment only.

    Raises:
        CommandError: no server is named, only one value of a pair is set, or the URL is invalid.
    """
    for url_name, key_name in _PAIRS:
        base_url, api_key = environment.get(url_name, ""), environment.get(key_name, "")
        if base_url and api_key:
            server = Client(base_url=base_url, api_key=api_key, source=f"{url_name}, {key_name}")
            break
        # OPENAI_API_KEY without a URL belongs to OpenAI: it is ignored.
        if base_url or (api_key and key_name == "CLOISTER_API_KEY"):
            present, missing = (url_name, key_name) if base_url else (key_name, url_name)
            neither = f"neither to use {data_dir}" if data_dir else "neither"
            raise CommandError(f"{present} is set, but {missing} is not: set both, or {neither}")
    else:
        if data_dir is None:
            raise CommandError("no server is named: set CLOISTER_BASE_URL and CLOISTER_API_KEY")
        path = data_dir / "client.env"
        local = read_client_env(path)
        if local is None:
            raise CommandError(
                "no server is named: set CLOISTER_BASE_URL (e.g. http://127.0.0.1:8000/v1) and CLOISTER_API_KEY, or "
                f"start `cloister local`, which writes both to {path} (--data-dir names another directory)"
            )
        server = local
    try:
        url = urlsplit(server.base_url)
        is_valid = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:  # the port is not a number
        is_valid = False
    if not is_valid:
        raise CommandError(
            f"the base URL {server.base_url!r} of {server.source} is invalid: it must look like https://host:8000/v1"
        )
    return replace(server, base_url=server.base_url.rstrip("/") + ("" if url.path.strip("/") else "/v1"))


@contextmanager
def open_client(data_dir: Path | None) -> Iterator["OpenAI"]:
    """Open the official client for the server, and turn errors of the API into ``CommandError``.

    Args:
        data_dir: the data directory of ``cloister local``; None to use the environment only.

    Raises:
        CommandError: no server is named, it is unreachable, or it refused a request.
    """
    # Importing openai takes half a second, which `cloister --help` does not need.
    import openai

    server = find_server(os.environ, data_dir)
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=3) as client:
        try:
            yield client
        except openai.APIStatusError as error:
            body: Any = error.body
            message = body.get("message") if isinstance(body, dict) else None
            reason = str(message or f"it answered {error.response.text[:200]!r}").rstrip(".")
            if error.status_code in {401, 403}:
                reason += f". The API key is that of {server.source}"
            raise CommandError(
                f"{reason}. (HTTP {error.status_code} from {server.base_url})",
                ExitCode.UNREACHABLE if error.status_code >= _SERVER_ERRORS else ExitCode.ERROR,
            ) from error
        except openai.APIConnectionError as error:
            reason = str(error.__cause__ or error)
            raise CommandError(
                f"cannot reach {server.base_url} ({server.source}): {reason}. Check that it runs and that the URL is "
                "right, then try again.",
                ExitCode.UNREACHABLE,
            ) from error
