"""Input of ``python -m ray_job.weights``: the objects of a model, and the directory to copy them to."""

import json
from dataclasses import dataclass
from typing import Final

from ray_job.contract.job_spec import JobSpecError, ObjectStoreLocation

WEIGHTS_VARIABLE: Final = "CLOISTER_WEIGHTS"
MODELS_DIRECTORY: Final = "/models"
"""The directory of the models in every pod of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCopy:
    """One model's directory, to be copied from the object store.

    Attributes:
        object_store: the store that holds the objects.
        prefix: the start of their keys, ending in ``/``. The rest of a key is the file's path in the directory.
        directory: the target directory.
        whole: copy the weights too. Without them the copy can only render and tokenize prompts.
        volume_gib: the size of the volume that holds the directory, in GiB.
        engine_volume_gib: the size of the volume of an engine's pod, which gets the weights too, in GiB.
        digest: of the model's manifest, which every copied file must match; empty for a model that nobody pinned.
        load_format: vLLM's engine argument. With ``auto``, weights that vLLM would not load are left out.
    """

    object_store: ObjectStoreLocation
    prefix: str
    directory: str
    whole: bool
    volume_gib: int
    engine_volume_gib: int
    load_format: str
    digest: str = ""

    @classmethod
    def from_json(cls, text: str) -> "WeightsCopy":
        """Read the value of the variable.

        Raises:
            JobSpecError: it is not JSON, or a field is missing or unknown.
        """
        try:
            raw = json.loads(text)
            return cls(**{**raw, "object_store": ObjectStoreLocation(**raw["object_store"])})
        except (ValueError, KeyError, TypeError) as error:
            raise JobSpecError(f"cannot read {WEIGHTS_VARIABLE}: {error}") from error
