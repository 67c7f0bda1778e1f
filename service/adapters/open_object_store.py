"""Opens the object store that the settings select."""

from pathlib import Path

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.s3_object_store import S3ObjectStore
from service.ports import ObjectStore


def open_object_store(location: ObjectStoreLocation) -> ObjectStore:
    """Open the store at a location. S3 is not contacted yet; a directory is created if it is missing.

    Raises:
        ObjectStoreError: the directory cannot be created.
    """
    if location.kind == "directory":
        return DirectoryObjectStore(Path(location.root))
    return S3ObjectStore(location)
