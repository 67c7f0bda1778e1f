"""Reports of the jobs of a model, as they are kept for estimates: its prompt rules, and measurements."""

import structlog

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.object_keys import prompt_rules_key
from ray_job.contract.prompt_rules import MAX_BYTES
from service.db import Pool
from service.db.rows import fetch_all
from service.errors import ObjectNotFoundError
from service.estimates import KEPT_MEASUREMENTS, MeasurementRow, Rates, fit_rates, model_key
from service.ports import ObjectStore

logger = structlog.get_logger(__name__)


def read_prompt_rules(store: ObjectStore, model: ModelSpec) -> bytes | None:
    """Return the prompt rules of a model as JSON; None before the first of its batches has ended.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    return read_small_object(store, prompt_rules_key(model_key(model)), MAX_BYTES)


def read_rates(pool: Pool, model: ModelSpec) -> Rates:
    """Return the rates of a model by its newest measurements."""
    values = {"model_key": model_key(model), "limit": KEPT_MEASUREMENTS}
    with pool.connection() as connection:
        measurements = fetch_all(connection, MeasurementRow, "measurements_of_model", values)
    return fit_rates(measurements)


def read_small_object(store: ObjectStore, key: str, max_bytes: int) -> bytes | None:
    """Return an object's content; None if it does not exist or is larger than allowed.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    content = bytearray()
    try:
        for chunk in store.read(key):
            content += chunk
            if len(content) > max_bytes:
                logger.warning("object.too_large", key=key, max_bytes=max_bytes)
                return None
    except ObjectNotFoundError:
        return None
    return bytes(content)
