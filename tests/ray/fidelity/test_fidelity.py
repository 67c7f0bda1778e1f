"""Every body that the job commits equals vLLM's own, except for ids and times."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import engine_flags, server_args
from tests.ray.fidelity.compare import differences
from tests.ray.fidelity.corpus import CHAT, COMPLETIONS, EMBEDDINGS, corpus
from tests.ray.fidelity.oracle import Answer, kept_oracle
from tests.ray.job_harness import ENGINE_ARGS, MakeJob

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloister"
EMBEDDING_ARGS = {**ENGINE_ARGS, "runner": "pooling", "convert": "embed"}


@pytest.fixture(scope="session")
def answers(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Answer]:
    """vLLM's answer to every line of the corpus."""
    lines = corpus()
    generated = [line for line in lines if line["url"] != EMBEDDINGS]
    embedded = [line for line in lines if line["url"] == EMBEDDINGS]
    asked = [(generated, "demo", ENGINE_ARGS), (embedded, "demo-embed", EMBEDDING_ARGS)]
    return {
        name: answer
        for some, model, engine_args in asked
        for name, answer in kept_oracle(
            some,
            _flags(demo_model, model, engine_args),
            model=demo_model,
            kept=CACHE / "oracle",
            directory=tmp_path_factory.mktemp("o"),
        ).items()
    }


def _flags(source: Path, model: str, engine_args: Mapping[str, Any]) -> list[str]:
    return engine_flags(server_args(ModelSpec(id=model, source=str(source), engine_args=engine_args)))


@pytest.mark.parametrize(
    ("endpoint", "model", "engine_args"),
    [
        (CHAT, "demo", ENGINE_ARGS),
        (COMPLETIONS, "demo", ENGINE_ARGS),
        (EMBEDDINGS, "demo-embed", EMBEDDING_ARGS),
    ],
)
def test_every_body_and_status_equals_vllms(
    make_joining_job: MakeJob, answers: Mapping[str, Answer], endpoint: str, model: str, engine_args: dict[str, Any]
) -> None:
    lines = [line for line in corpus() if line["url"] == endpoint]
    job = make_joining_job(
        [line["body"] for line in lines], endpoint=endpoint, id=model, engine_args=engine_args, batch_size=16
    )
    exit_code, output = job.run()
    assert exit_code == 0, output
    rows = job.rows()
    assert [row.line for row in rows] == list(range(1, len(lines) + 1))
    unequal = {
        line["custom_id"]: found
        for line, row in zip(lines, rows, strict=True)
        if (found := _differences(answers[line["custom_id"]], row.status, row.body))
    }
    assert unequal == {}
    for row in rows:
        assert (row.outcome == "failed") == (row.status >= 400)
        if row.outcome == "failed":
            assert set(row.body["error"]) == {"message", "type", "param", "code"}, json.dumps(row.body)


def _differences(answer: Answer, status: int, body: Any) -> list[str]:
    return list(differences([answer.status, answer.body], [status, body]))
