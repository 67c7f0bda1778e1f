"""The connection of a command to the public API, by the official client as any program's."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from service.cli.exits import CommandError, ExitCode
from service.local.client_env import read_client_env

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI

ClientDataDir = Annotated[
    Path,
    typer.Option(
        help="The directory of the `cloister local` to talk to. CLOISTER_BASE_URL and CLOISTER_API_KEY, or "
        "OPENAI_BASE_URL and OPENAI_API_KEY, name another server."
    ),
]

# In this order; both of a pair come from the same place, so that a key goes only where it belongs.
_PAIRS: Final = (("CLOISTER_BASE_URL", "CLOISTER_API_KEY"), ("OPENAI_BASE_URL", "OPENAI_API_KEY"))
_SERVER_ERRORS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the API is, the key for it, and where both were found."""

    base_url: str
    api_key: str = field(repr=False)
    source: str


def find_server(environment: Mapping[str, str], data_dir: Path | None) -> Server:
    """The server that the environment names, or else the ``cloister local`` of a data directory, if one is given.

    Raises:
        CommandError: there is none, or it is named by half.
    """
    for url_name, key_name in _PAIRS:
        base_url, api_key = environment.get(url_name, ""), environment.get(key_name, "")
        if base_url and api_key:
            return Server(base_url=_with_path(base_url, url_name), api_key=api_key, source=f"{url_name}, {key_name}")
        # A key without a URL is one for OpenAI, which is none of our business.
        if base_url or (api_key and key_name == "CLOISTER_API_KEY"):
            there, lacking = (url_name, key_name) if base_url else (key_name, url_name)
            neither = f"neither to use {data_dir}" if data_dir else "neither"
            raise CommandError(f"{there} is set, but {lacking} is not: set both, or {neither}")
    if data_dir is None:
        raise CommandError("no server is named: set CLOISTER_BASE_URL and CLOISTER_API_KEY")
    path = data_dir / "client.env"
    if local := read_client_env(path):
        return Server(base_url=_with_path(local.base_url, str(path)), api_key=local.api_key, source=str(path))
    raise CommandError(
        f"no server is named: set CLOISTER_BASE_URL (e.g. http://127.0.0.1:8000/v1) and CLOISTER_API_KEY, or start "
        f"`cloister local`, which writes both to {path} (--data-dir names another directory)"
    )


def _with_path(base_url: str, source: str) -> str:
    if not _is_http(base_url):
        raise CommandError(f"the base URL {base_url!r} of {source} is none: it must look like https://host:8000/v1")
    parts = urlsplit(base_url)
    return base_url.rstrip("/") if parts.path.strip("/") else f"{base_url.rstrip('/')}/v1"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port is a word
        return False


@contextmanager
def open_client(data_dir: Path | None) -> Iterator["OpenAI"]:
    """The official client for the server; errors of the API become errors of the command.

    Raises:
        CommandError: the server is not named, cannot be reached, or refused.
    """
    # Half a second that `cloister --help` need not wait.
    import openai

    server = find_server(os.environ, data_dir)
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=3) as client:
        try:
            yield client
        except openai.APIStatusError as error:
            raise _refused(error, server) from error
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            raise CommandError(
                f"cannot reach {server.base_url} ({server.source}): {reason}. Check that it runs and that the URL is "
                "right, then try again.",
                ExitCode.UNREACHABLE,
            ) from error


def _refused(error: "APIStatusError", server: Server) -> CommandError:
    body: Any = error.body
    message = body.get("message") if isinstance(body, dict) else None
    told = str(message or f"it answered {error.response.text[:200]!r}").rstrip(".")
    if error.status_code in {401, 403}:
        told += f". The API key is that of {server.source}"
    code = ExitCode.UNREACHABLE if error.status_code >= _SERVER_ERRORS else ExitCode.ERROR
    return CommandError(f"{told}. (HTTP {error.status_code} from {server.base_url})", code)
