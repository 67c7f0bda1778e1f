"""The server under check, and how the suite talks to it: the official clients, and plain HTTP."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import openai

_POLL_S: Final = 0.5


class UnusableTargetError(Exception):
    """Nothing can be checked: the server does not answer, refuses the key, or does not know the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and what to use on it.

    Attributes:
        base_url: with ``/v1`` at its end, as the official clients take it.
        api_key: a key that may read and submit.
        model: answers ``/v1/chat/completions``.
        completions_model: perhaps answers ``/v1/completions``.
        embeddings_model: perhaps answers ``/v1/embeddings``.
        timeout_s: how long to wait for the end of a batch.
        large: whether to upload more than 200 MB.
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
        """The official client; it repeats nothing unless told to."""
        return openai.OpenAI(**{"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, **options})

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The official asynchronous client."""
        return openai.AsyncOpenAI(**{"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, **options})

    def http(self, **headers: str) -> httpx.Client:
        """Plain HTTP with a good key, for what the official client would not send."""
        return httpx.Client(
            base_url=f"{self.base_url}/", headers={"authorization": f"Bearer {self.api_key}", **headers}, timeout=60
        )


def check_usable(target: Target) -> None:
    """Asks for the model, so that a wrong address or key is told once and not 200 times.

    Raises:
        UnusableTargetError: the message says what to change.
    """
    try:
        with target.client() as client:
            client.models.retrieve(target.model)
    except openai.AuthenticationError:
        raise UnusableTargetError(f"{target.base_url} refuses the API key") from None
    except openai.NotFoundError:
        raise UnusableTargetError(
            f"{target.base_url} knows no model {target.model!r}, or is no OpenAI-compatible base URL (it ends with /v1)"
        ) from None
    except openai.OpenAIError as error:
        raise UnusableTargetError(f"{target.base_url} does not answer: {error}") from None


def contract_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without what servers add to it under names of their own."""
    return {name: value for name, value in batch.items() if not name.startswith("x_")}


@dataclass(slots=True, kw_only=True)
class Watched:
    """A batch that is waited for, and each status that was seen meanwhile.

    The time to wait counts from the beginning, so that a server on which many batches never end is given up once.
    """

    client: openai.OpenAI
    id: str
    timeout_s: float
    statuses: list[str] = field(default_factory=list)
    _last: dict[str, Any] | None = None
    _began_s: float = field(default_factory=time.monotonic)

    def look(self) -> dict[str, Any]:
        """The batch as it is now."""
        batch: dict[str, Any] = self.client.batches.retrieve(self.id).to_dict()
        if not self.statuses or self.statuses[-1] != batch["status"]:
            self.statuses.append(str(batch["status"]))
        return batch

    def when_past(self, *statuses: str) -> dict[str, Any]:
        """The batch once it has left these statuses.

        Raises:
            TimeoutError: it has not in time.
        """
        while (batch := self.look())["status"] in statuses:
            if time.monotonic() > self._began_s + self.timeout_s:
                raise TimeoutError(f"{self.id} is still {batch['status']} after {self.timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return batch

    def ended(self) -> dict[str, Any]:
        """The batch at its end; asked for once."""
        if self._last is None:
            self._last = self.when_past("validating", "in_progress", "finalizing", "cancelling")
        return self._last
