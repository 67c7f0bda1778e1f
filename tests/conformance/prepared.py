"""Slow work, started before the first check so that it proceeds while the quick checks run."""

from dataclasses import dataclass, field
from typing import Any, Final

import openai

from tests.conformance.bad_files import BAD_FILES, NO_JSONL
from tests.conformance.target import Target, Watched
from tests.conformance.workload import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    NO_FILE,
    chat,
    jsonl,
    line,
    main_workload,
    unusual_but_valid,
)

OUTPUT_EXPIRES_AFTER_S: Final = 7_200
METADATA: Final = {"purpose": "conformance", "größe": "1 €"}
COMPLETION_LINES: Final = 3
EMBEDDING_INPUTS: Final = ("one", "two", "three")


@dataclass(slots=True)
class Prepared:
    """The batches by name, and the errors of uploads and creations that failed."""

    target: Target
    client: openai.OpenAI
    batches: dict[str, Watched] = field(default_factory=dict)
    created: dict[str, dict[str, Any]] = field(default_factory=dict)
    refusals: dict[str, Exception] = field(default_factory=dict)

    def start(self, name: str, content: bytes, endpoint: str = CHAT, **options: Any) -> None:
        """Upload a file and create a batch of it."""
        try:
            file = self.client.files.create(file=(f"{name}.jsonl", content), purpose="batch")
        except openai.OpenAIError as error:
            self.refusals[name] = error
        else:
            self.start_on(name, file.id, endpoint, **options)

    def start_on(self, name: str, file_id: str, endpoint: str = CHAT, **options: Any) -> None:
        """Create a batch of an uploaded file."""
        request = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **options}
        try:
            batch: Any = self.client.batches.create(**request)
        except openai.OpenAIError as error:
            self.refusals[name] = error
            return
        self.created[name] = batch.to_dict()
        self.batches[name] = Watched(
            client=self.client, id=batch.id, timeout_s=self.target.timeout_s, statuses=[batch.status]
        )

    def cancel(self, name: str, *, after_validation: bool = False) -> None:
        """Cancel a started batch; a batch that has already ended stays unchanged."""
        try:
            if name in self.batches:
                if after_validation:
                    self.batches[name].when_past("validating")
                self.client.batches.cancel(self.batches[name].id)
        except openai.ConflictError:
            pass
        except (openai.OpenAIError, TimeoutError) as error:
            self.refusals[name] = error

    def batch(self, name: str) -> Watched:
        """Return a started batch.

        Raises:
            Exception: the error of its upload or creation.
        """
        if name in self.refusals:
            raise self.refusals[name]
        return self.batches[name]


def prepare(target: Target, client: openai.OpenAI) -> Prepared:
    """Start all batches."""
    prepared = Prepared(target, client)
    prepared.start(
        "main",
        main_workload(target.model).content,
        metadata=METADATA,
        output_expires_after={"anchor": "created_at", "seconds": OUTPUT_EXPIRES_AFTER_S},
    )
    _start_other_endpoints(prepared)
    prepared.start("all refused", jsonl(chat(f"bad-{n}", target.model, temperature=-1) for n in range(2)))
    prepared.start("cancelled at once", jsonl(chat(f"c-{n}", target.model) for n in range(3)))
    prepared.cancel("cancelled at once")
    prepared.start("unusual but valid", unusual_but_valid(target.model))
    prepared.start_on("no file", NO_FILE)
    for name, bad in BAD_FILES.items():
        prepared.start(name, bad.content(target.model))
    for name, content in NO_JSONL.items():
        prepared.start(name, content)
    # Last, so that validation has time to finish; any later, and the batch might complete first.
    prepared.cancel("unusual but valid", after_validation=True)
    return prepared


def _start_other_endpoints(prepared: Prepared) -> None:
    target = prepared.target
    completions = (
        line(f"p-{n}", {"model": target.completions_model, "prompt": "Once", "max_tokens": 2}, COMPLETIONS)
        for n in range(COMPLETION_LINES)
    )
    prepared.start("completions", jsonl(completions), COMPLETIONS)
    embeddings = [
        line("several", {"model": target.embeddings_model, "input": list(EMBEDDING_INPUTS)}, EMBEDDINGS),
        line("single", {"model": target.embeddings_model, "input": "four"}, EMBEDDINGS),
    ]
    prepared.start("embeddings", jsonl(embeddings), EMBEDDINGS)
    too_many = [
        line(f"e-{n}", {"model": target.embeddings_model, "input": ["x"] * 20_000}, EMBEDDINGS) for n in range(3)
    ]
    prepared.start("too many inputs", jsonl(too_many), EMBEDDINGS)
