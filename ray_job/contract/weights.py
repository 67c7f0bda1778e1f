"""What ``python -m ray_job.weights`` is told: which objects are a model, and where its directory is to be."""

import json
from dataclasses import dataclass
from typing import Final

from ray_job.contract.job_spec import ObjectStoreLocation

WEIGHTS_VARIABLE: Final = "CLOISTER_WEIGHTS"


class WeightsError(ValueError):
    """The variable cannot be read, or the objects are no model; the message says which."""


class MissingModelError(WeightsError):
    """The object store has no such model; the message says where it is to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCopy:
    """One model's directory, from the object store.

    Attributes:
        object_store: where the objects are.
        prefix: of their keys, ending in ``/``; what follows is the file's path in the directory.
        directory: where they go.
        whole: with the weights; without them only what renders and tokenizes.
    """

    object_store: ObjectStoreLocation
    prefix: str
    directory: str
    whole: bool

    @classmethod
    def from_json(cls, text: str) -> "WeightsCopy":
        """Reads the variable's value.

        Raises:
            WeightsError: it is not JSON, or a field is missing or unknown.
        """
        try:
            raw = json.loads(text)
            return cls(**{**raw, "object_store": ObjectStoreLocation(**raw["object_store"])})
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"cannot read {WEIGHTS_VARIABLE}: {error}") from error
