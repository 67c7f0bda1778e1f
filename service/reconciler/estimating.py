"""Estimates of batches: the prompt rules and measurements that jobs report, kept for later batches of the model.

A job can write below the prefix of its batch only. What it wrote there is checked before it counts for others.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

import structlog

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.measurement import MAX_BYTES as MAX_MEASUREMENT_BYTES
from ray_job.contract.measurement import Measurement, MeasurementError
from ray_job.contract.object_keys import batch_prompt_rules_key, file_key, measurement_key, prompt_rules_key
from ray_job.contract.prompt_rules import MAX_BYTES, PromptRules, PromptRulesError
from service.db import query
from service.errors import ObjectNotFoundError
from service.estimates import model_key
from service.input_file import InputFacts, read_input_file
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


def read_and_count(backends: Backends, batch: Batch, file: Mapping[str, Any]) -> InputFacts:
    """Read and check the input file of a batch, and count its tokens if the tokenizer of its model is known.

    Args:
        backends: the object store and the models.
        batch: the batch.
        file: the row of its input file.

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
    chunks = backends.store.read(file_key(batch.input_file_id))
    return read_input_file(chunks, endpoint=batch.endpoint, models=backends.catalogue, file_count=count)


def adopt_reports(backends: Backends, batch: Batch) -> dict[str, Any] | None:
    """Keep the prompt rules that the job of a completed batch reported.

    Returns:
        Parameters of ``record_measurement``; None if the job reported no measurement.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    model, store = backends.catalogue.get(batch.model or ""), backends.store
    if model is None:
        return None
    text = read_small_object(store, batch_prompt_rules_key(batch.id), MAX_BYTES)
    try:
        if text is not None and text != read_prompt_rules(store, model.spec):
            _counter(text)
            store.put(prompt_rules_key(model_key(model.spec)), [text])
            logger.info("prompt_rules.adopted", model=model.id, batch_id=batch.id, size_bytes=len(text))
    except PromptRulesError as error:
        logger.warning("prompt_rules.invalid", model=model.id, batch_id=batch.id, error=str(error))
    report = read_small_object(store, measurement_key(batch.id), MAX_MEASUREMENT_BYTES)
    try:
        measurement = None if report is None else Measurement.from_json(report)
    except MeasurementError as error:
        logger.warning("measurement.invalid", batch_id=batch.id, error=str(error))
        return None
    if measurement is None:
        return None
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
    return {"model_key": model_key(model.spec), "most_output": most_output, **dataclasses.asdict(measurement)}


@functools.lru_cache(maxsize=_MAX_COUNTERS)
def _counter(text: bytes) -> PromptCounter:
    return PromptCounter(PromptRules.from_json(text))
