"""What ``python -m ray_job.weights`` is told: which objects are a model, and where its directory is to be."""

import json
from dataclasses import dataclass
from typing import Final

from ray_job.contract.job_spec import ObjectStoreLocation

WEIGHTS_VARIABLE: Final = "CLOISTER_WEIGHTS"


class WeightsError(ValueError):
    """The variable cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCopy:
    """One model's directory, from the object store.

    Attributes:
        object_store: where the objects are.
        prefix: of their keys, ending in ``/``; what follows is the file's path in the directory.
        directory: where they go.
        whole: with the weights; without them only what renders and tokenizes.
        volume_gib: how much the volume of the directory holds, in GiB.
        engine_volume_gib: how much the volume of an engine's pod holds, which gets the weights too, in GiB.
        load_format: vLLM's engine argument. With ``auto`` weights that vLLM would not load are left out.
    """

    object_store: ObjectStoreLocation
    prefix: str
    directory: str
    whole: bool
    volume_gib: int
    engine_volume_gib: int
    load_format: str

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
