"""The corpus of the fidelity test."""

from tests.ray.fidelity.corpus import CHAT, COMPLETIONS, EMBEDDINGS, corpus


def test_corpus_is_deterministic_and_large() -> None:
    assert corpus() == corpus()
    assert len(corpus()) >= 120


def test_corpus_covers_every_endpoint_and_refused_lines() -> None:
    assert {line["url"] for line in corpus()} == {CHAT, COMPLETIONS, EMBEDDINGS}
    assert sum("refuse-" in line["custom_id"] for line in corpus()) >= 15
