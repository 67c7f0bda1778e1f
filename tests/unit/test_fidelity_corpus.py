"""The corpus of the fidelity test covers what it says."""

from tests.ray.fidelity.corpus import CHAT, COMPLETIONS, EMBEDDINGS, corpus


def test_the_corpus_is_the_same_each_time_and_large() -> None:
    assert corpus() == corpus()
    assert len(corpus()) >= 120


def test_every_endpoint_has_lines_and_at_least_15_are_meant_to_be_refused() -> None:
    assert {line["url"] for line in corpus()} == {CHAT, COMPLETIONS, EMBEDDINGS}
    assert sum("refuse-" in line["custom_id"] for line in corpus()) >= 15
