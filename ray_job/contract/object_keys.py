"""Keys of the objects that cloister keeps in its object store.

files/{file_id}                       an uploaded or assembled file, as the client sees it
batches/{batch_id}/plan               the lines of a batch in the order of execution
batches/{batch_id}/parts/{part_id}    the results of some lines of a batch
batches/{batch_id}/prompt_rules.json  how the engine of its job counts prompts
batches/{batch_id}/measurement.json   what its job measured
jobs/{job_id}/prompt_rules.json       how the engine of a job counts prompts
prompt_rules/{model_key}.json         how the engines of a model count prompts, which jobs cannot write
models/{digest}/{path}                a file of a pushed model; the digest is the SHA-256 of its manifest
models/{digest}/manifest.json         the manifest: see ray_job.contract.model_manifest
stacks/{stack_id}                     a mark of each database that these objects belong to: the head of its audit log
"""

import hashlib
import re
import secrets
from collections.abc import Sequence

from ray_job.contract.model_manifest import MANIFEST_NAME

STACKS_PREFIX = "stacks/"
"""Prefix of the marks of databases."""
MODELS_PREFIX = "models/"
"""Prefix of the models that jobs load, pushed or copied there."""


def file_key(file_id: str) -> str:
    """Return the key of a file's content."""
    return f"files/{file_id}"


def batch_prefix(batch_id: str) -> str:
    """Return the prefix of all objects of a batch except its files."""
    return f"batches/{batch_id}/"


def plan_key(batch_id: str) -> str:
    """Return the key of a batch's plan."""
    return f"{batch_prefix(batch_id)}plan"


def parts_prefix(batch_id: str) -> str:
    """Return the prefix of a batch's part objects."""
    return f"{batch_prefix(batch_id)}parts/"


def batch_prompt_rules_key(batch_id: str) -> str:
    """Return the key of the prompt rules that a batch's job wrote."""
    return f"{batch_prefix(batch_id)}prompt_rules.json"


def job_prompt_rules_key(job_id: str) -> str:
    """Return the key of the prompt rules that a job wrote."""
    return f"jobs/{job_id}/prompt_rules.json"


def measurement_key(batch_id: str) -> str:
    """Return the key of the measurement that a batch's job wrote."""
    return f"{batch_prefix(batch_id)}measurement.json"


def prompt_rules_key(model_key: str) -> str:
    """Return the key of the prompt rules of a model, by the digest of its settings."""
    return f"prompt_rules/{model_key}.json"


def stack_key(stack_id: str) -> str:
    """Return the key of the mark of a database."""
    return f"{STACKS_PREFIX}{stack_id}"


def model_prefix(digest: str) -> str:
    """Return the prefix of the files of a pushed model.

    Args:
        digest: ``sha256:`` and 64 hexadecimal digits.
    """
    return f"{MODELS_PREFIX}{digest.removeprefix('sha256:')}/"


def manifest_key(digest: str) -> str:
    """Return the key of the manifest of a pushed model."""
    return f"{model_prefix(digest)}{MANIFEST_NAME}"


def part_key(batch_id: str, lines: Sequence[int]) -> str:
    """Return the key of one part object, which the line numbers determine: a repeated write replaces itself."""
    ordered = sorted(lines)
    digest = hashlib.sha256(",".join(map(str, ordered)).encode()).hexdigest()
    return f"{parts_prefix(batch_id)}{ordered[0]:08d}-{len(ordered):05d}-{digest[:16]}.part"


def new_part_key(batch_id: str, job_id: str) -> str:
    """Return an unused key for a part object that a job writes."""
    return f"{parts_prefix(batch_id)}{job_id}-{secrets.token_hex(8)}.part"


def is_part_key(key: str, *, batch_id: str, job_id: str) -> bool:
    """Return whether ``new_part_key`` can have returned a key for this batch and job."""
    return re.fullmatch(rf"{re.escape(parts_prefix(batch_id) + job_id)}-[0-9a-f]{{16}}\.part", key) is not None
