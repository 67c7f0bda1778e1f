"""Estimates of batches: prompt rules that jobs report, and measurements of their work, for later batches of the model.

A job can write below its own prefix only. What it wrote there is checked before it counts for others.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, Final

import structlog

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.object_keys import file_key, job_prompt_rules_key, prompt_rules_key
from ray_job.contract.prompt_rules import MAX_BYTES, PromptRules, PromptRulesError
from service.db import query
from service.errors import ObjectNotFoundError
from service.estimates import model_key
from service.input_file import InputFacts, LineConsumer, read_input_file
from service.model_reports import read_prompt_rules, read_small_object
from service.ports import ObjectStore
from service.prompts import FileCount, PromptCounter
from service.reconciler.backends import Backends
from service.reconciler.records import Batch

logger = structlog.get_logger(__name__)

# Open counters, of at most some 100 MB each.
_MAX_COUNTERS: Final = 2


def find_counter(store: ObjectStore, model: ModelSpec) -> PromptCounter | None:
    """Return the counter of a model; None before the first of its batches has ended.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    text = read_prompt_rules(store, model)
    try:
        return None if text is None else _counter(text)
    except PromptRulesError as error:
        logger.warning("prompt_rules.invalid", model=model.id, error=str(error))
        return None


def read_and_count(
    backends: Backends, batch: Batch, file: Mapping[str, Any], on_lines: LineConsumer | None = None
) -> InputFacts:
    """Read and check the input file of a batch, and count its tokens if the tokenizer of its model is known.

    Args:
        backends: the object store and the models.
        batch: the batch.
        file: the row of its input file.
        on_lines: receives the lines while the batch is validated; see ``read_input_file``. Without it, the images
            that are uploaded files are not looked up: after the batch they may be deleted.

    Raises:
        ObjectNotFoundError: the content of the file is gone.
        ObjectStoreError: the store cannot be reached.
    """
    count = FileCount(
        find_counter=lambda model: find_counter(backends.store, backends.catalogue[model].spec),
        endpoint=batch.endpoint,
        size_bytes=file["size_bytes"],
        line_count=file["line_count"],
    )

    def find_images(ids: Collection[str]) -> dict[str, int]:
        with backends.pool.connection() as connection:
            values = {"ids": list(ids), "project_id": batch.project_id}
            return {row["id"]: row["size_bytes"] for row in connection.execute(query("find_images"), values)}

    return read_input_file(
        backends.store.read(file_key(batch.input_file_id)),
        endpoint=batch.endpoint,
        models=backends.catalogue,
        file_count=count,
        on_lines=on_lines,
        find_files=find_images if on_lines else None,
    )


def adopt_reports(backends: Backends, batch: Batch) -> dict[str, Any] | None:
    """Keep the prompt rules that the jobs of a completed batch reported.

    Returns:
        Parameters of ``record_measurement``; None if its model is no longer offered.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    model = backends.catalogue.get(batch.model or "")
    if model is None:
        return None
    key = model_key(model.spec)
    with backends.pool.connection() as connection:
        values = {"batch_id": batch.id, "model_key": key}
        jobs = [row["id"] for row in connection.execute(query("jobs_with_commits"), values)]
    for job_id in jobs:
        adopt_prompt_rules(backends.store, model.spec, job_id)
    most_output = batch.most_output
    if most_output is None:
        # The first batch of a model: its tokens were unknown when it was validated.
        with backends.pool.connection() as connection:
            values = {"file_id": batch.input_file_id, "project_id": batch.project_id}
            file = connection.execute(query("input_file_of_batch"), values).fetchone()
        try:
            tokens = read_and_count(backends, batch, file).tokens if file else None
        except ObjectNotFoundError:
            tokens = None
        most_output = tokens.most_output if tokens else None
    return {"model_key": key, "most_output": most_output}


def adopt_prompt_rules(store: ObjectStore, model: ModelSpec, job_id: str) -> None:
    """Keep the prompt rules that a job of a model has reported, if there are any, and delete the report.

    Args:
        store: the object store.
        model: the model, with the settings that the job runs with.
        job_id: the job.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    key = job_prompt_rules_key(job_id)
    text = read_small_object(store, key, MAX_BYTES)
    if text is None:
        return
    try:
        if text != read_prompt_rules(store, model):
            _counter(text)
            store.put(prompt_rules_key(model_key(model)), [text])
            logger.info("prompt_rules.adopted", model=model.id, job_id=job_id, size_bytes=len(text))
    except PromptRulesError as error:
        logger.warning("prompt_rules.invalid", model=model.id, job_id=job_id, error=str(error))
    # Rules have megabytes, and the job may work on many more batches.
    store.delete(key)


@functools.lru_cache(maxsize=_MAX_COUNTERS)
def _counter(text: bytes) -> PromptCounter:
    return PromptCounter(PromptRules.from_json(text))
