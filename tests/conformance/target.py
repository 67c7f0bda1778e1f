"""The server under check, and the clients of the suite: the official ones and plain HTTP."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import openai

_POLL_S: Final = 0.5


class UnusableTargetError(Exception):
    """The server cannot be checked: it does not answer, refuses the key, or does not know the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and the keys and models to use on it.

    Attributes:
        base_url: URL that ends with ``/v1``, as the official clients expect.
        api_key: a key that may read and submit.
        model: a model that answers ``/v1/chat/completions``.
        completions_model: the model for ``/v1/completions``; it may not serve it.
        embeddings_model: the model for ``/v1/embeddings``; it may not serve it.
        timeout_s: seconds to wait for the end of a batch.
        large: upload a file of more than 200 MB too.
        other_api_key: a key of another project, or "".
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    completions_model: str
    embeddings_model: str
    timeout_s: float
    large: bool = False
    other_api_key: str = field(default="", repr=False)

    def client(self, **options: Any) -> openai.OpenAI:
        """Create the official client, by default without retries."""
        return openai.OpenAI(**{"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, **options})

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Create the official asynchronous client, by default without retries."""
        return openai.AsyncOpenAI(**{"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, **options})

    def http(self, **headers: str) -> httpx.Client:
        """Create a plain HTTP client with a valid key, for requests that the official client would not send."""
        return httpx.Client(
            base_url=f"{self.base_url}/", headers={"authorization": f"Bearer {self.api_key}", **headers}, timeout=60
        )


def check_usable(target: Target) -> None:
    """Request the model, so that a wrong address or key is reported once and not 200 times.

    Raises:
        UnusableTargetError: the message names what to change.
    """
    try:
        with target.client() as client:
            client.models.retrieve(target.model)
    except openai.AuthenticationError:
        raise UnusableTargetError(f"{target.base_url} refuses the API key") from None
    except openai.NotFoundError:
        raise UnusableTargetError(
            f"{target.base_url} does not serve {target.model!r}, or is not an OpenAI-compatible URL (ends with /v1)"
        ) from None
    except openai.OpenAIError as error:
        raise UnusableTargetError(f"{target.base_url} does not answer: {error}") from None


def contract_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without the fields that servers add (``x_…``)."""
    return {name: value for name, value in batch.items() if not name.startswith("x_")}


@dataclass(slots=True, kw_only=True)
class Watched:
    """A batch to wait for, and each status that it has shown.

    The timeout counts from the creation of this object, so a server on which no batch ends costs one timeout.
    """

    client: openai.OpenAI
    id: str
    timeout_s: float
    statuses: list[str] = field(default_factory=list)
    _last: dict[str, Any] | None = None
    _began_s: float = field(default_factory=time.monotonic)

    def look(self) -> dict[str, Any]:
        """Return the current batch."""
        batch: dict[str, Any] = self.client.batches.retrieve(self.id).to_dict()
        if not self.statuses or self.statuses[-1] != batch["status"]:
            self.statuses.append(str(batch["status"]))
        return batch

    def when_past(self, *statuses: str) -> dict[str, Any]:
        """Wait until the batch has left these statuses, and return it.

        Raises:
            TimeoutError: the batch is still in one of them after the timeout.
        """
        while (batch := self.look())["status"] in statuses:
            if time.monotonic() > self._began_s + self.timeout_s:
                raise TimeoutError(f"{self.id} is still {batch['status']} after {self.timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return batch

    def ended(self) -> dict[str, Any]:
        """Wait for the end of the batch and return it; later calls return the same object."""
        if self._last is None:
            self._last = self.when_past("validating", "in_progress", "finalizing", "cancelling")
        return self._last
