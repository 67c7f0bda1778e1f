"""``client.env``: the base URL and the API key, for scripts (``set -a; . client.env``)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from service.local.layout import write_private_file

# Printed when everything is ready.
FIRST_STEPS: Final = """
cloister is ready. Press Ctrl-C to stop it; batches and files are kept.

  base URL  {base_url}
  API key   {api_key}
  model     {model_id}
  (base URL and API key are also in {client_env})

  from openai import OpenAI
  client = OpenAI(base_url="{base_url}", api_key="{api_key}")
  file = client.files.create(file=open("requests.jsonl", "rb"), purpose="batch")
  batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
  batch = client.batches.retrieve(batch.id)  # until batch.status is "completed"
  print(client.files.content(batch.output_file_id).text)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Base URL and API key of an OpenAI client.

    Attributes:
        base_url: the API's URL with its path, e.g. ``https://host/v1``.
        api_key: the client's key.
        source: the environment variables or the file that both come from; empty for those of a new stack.
    """

    base_url: str
    api_key: str = field(repr=False)
    source: str = field(default="", compare=False)


def read_client_env(path: Path) -> Client | None:
    """Read the file; return None if it does not exist or lacks one of the values."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    base_url, api_key = values.get("OPENAI_BASE_URL", ""), values.get("OPENAI_API_KEY", "")
    return Client(base_url=base_url, api_key=api_key, source=str(path)) if base_url and api_key else None


def write_client_env(path: Path, client: Client) -> None:
    """Write the file, complete or not at all, readable by its owner only."""
    write_private_file(path, f"OPENAI_BASE_URL={client.base_url}\nOPENAI_API_KEY={client.api_key}\n")
