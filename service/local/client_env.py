"""``client.env``: the base URL and the API key, for scripts (``set -a; . client.env``)."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What an OpenAI client needs."""

    base_url: str
    api_key: str


def read_client_env(path: Path) -> Client | None:
    """What the file says, or None when it is not there or lacks one of the values."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    base_url, api_key = values.get("OPENAI_BASE_URL", ""), values.get("OPENAI_API_KEY", "")
    return Client(base_url=base_url, api_key=api_key) if base_url and api_key else None


def write_client_env(path: Path, client: Client) -> None:
    """Writes the file, whole or not at all, readable by its owner only."""
    staging = path.with_name(f"{path.name}.new")
    staging.unlink(missing_ok=True)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"OPENAI_BASE_URL={client.base_url}\nOPENAI_API_KEY={client.api_key}\n")
    staging.replace(path)


def first_steps(client: Client, client_env: Path, model_id: str) -> str:
    """The block that is printed once everything is up."""
    return f"""
cloister is ready; Ctrl-C stops it, and nothing is lost.

  base URL  {client.base_url}
  API key   {client.api_key}
  model     {model_id}
  (the first two also stand in {client_env})

  from openai import OpenAI
  client = OpenAI(base_url="{client.base_url}", api_key="{client.api_key}")
  file = client.files.create(file=open("requests.jsonl", "rb"), purpose="batch")
  batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
  batch = client.batches.retrieve(batch.id)  # until batch.status is "completed"
  print(client.files.content(batch.output_file_id).text)
"""
