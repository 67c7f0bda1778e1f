import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.bench.workloads import EMBEDDINGS, LARGE_ROW_BYTES, WORKLOADS, lognormal_tokens, write_workload

LINES = 200
SMALL = [name for name in WORKLOADS if name != "large-rows"]


def bodies(name: str, lines: int = LINES) -> list[dict[str, Any]]:
    return list(WORKLOADS[name].bodies(random.Random(1), lines))  # noqa: S311 - no secrets


def systems(name: str) -> list[str]:
    return [body["messages"][0]["content"] for body in bodies(name)]


@pytest.mark.parametrize("name", SMALL)
def test_equal_seeds_write_equal_files(name: str, tmp_path: Path) -> None:
    for file, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_workload(tmp_path / file, name, LINES, model="m", seed=seed)
    first, second, other = ((tmp_path / file).read_bytes() for file in "abc")
    assert first == second != other


@pytest.mark.parametrize("name", SMALL)
def test_every_line_is_a_request_for_the_endpoint(name: str, tmp_path: Path) -> None:
    write_workload(tmp_path / "file", name, LINES, model="m")
    lines = [json.loads(line) for line in (tmp_path / "file").read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == LINES
    assert {line["url"] for line in lines} == {WORKLOADS[name].endpoint}
    assert {line["body"]["model"] for line in lines} == {"m"}


def test_answers_are_lognormal() -> None:
    chance = random.Random(1)  # noqa: S311 - no secrets
    lengths = sorted(lognormal_tokens(chance) for _ in range(20_000))
    assert statistics.median(lengths) == pytest.approx(60, rel=0.05)
    assert lengths[int(0.99 * len(lengths))] == pytest.approx(600, rel=0.1)


def test_lengths_are_asked_for_exactly() -> None:
    assert all(body["min_tokens"] == body["max_tokens"] for body in bodies("lognormal"))


def test_equal_system_prompts_are_shuffled() -> None:
    found = systems("shared-prefix")
    assert len(set(found)) == 40
    assert found[:40] != found[40:80]


def test_differing_tails_leave_40_prefixes() -> None:
    found = systems("shared-prefix-tails")
    assert len(set(found)) == LINES
    assert len({prompt.rpartition("\n")[0] for prompt in found}) == 40


def test_neighbours_share_documents() -> None:
    documents = [body["messages"][0]["content"].split("\n\n")[0] for body in bodies("documents")]
    changes = sum(one != other for one, other in itertools.pairwise(documents))
    assert changes + 1 == len(set(documents)) < LINES / 2


def test_few_shot_examples_start_the_first_user_message() -> None:
    contents = [body["messages"][0]["content"] for body in bodies("few-shot")]
    assert len({content.split("\n\n")[0] for content in contents}) <= 30


def test_every_tenth_line_is_a_duplicate() -> None:
    texts = [json.dumps(body) for body in bodies("duplicates")]
    assert len(set(texts)) == LINES * 0.9


def test_every_hundredth_line_is_very_long() -> None:
    assert sum(body["max_tokens"] == 2000 for body in bodies("long-rows")) >= LINES // 100


def test_one_row_is_poisoned() -> None:
    assert sum("vllm_xargs" in body for body in bodies("poisoned")) == 1


def test_embeddings_have_an_input() -> None:
    assert WORKLOADS["embeddings"].endpoint == EMBEDDINGS
    assert all(body["input"] for body in bodies("embeddings"))


def test_large_rows_stay_within_the_limit_of_a_line() -> None:
    (body,) = bodies("large-rows", 1)
    assert 0.99 * LARGE_ROW_BYTES < len(json.dumps(body)) < 10 * 1024 * 1024
