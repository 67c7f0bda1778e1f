"""Opens the object store that the settings name."""

from pathlib import Path

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.s3_object_store import S3ObjectStore, open_s3_client
from service.ports import ObjectStore


def open_object_store(location: ObjectStoreLocation) -> ObjectStore:
    """The store at a location; nothing is sent to S3 yet, a directory is made if it is not there.

    Raises:
        ObjectStoreError: the directory cannot be made.
    """
    if location.kind == "directory":
        return DirectoryObjectStore(Path(location.root))
    return S3ObjectStore(location, open_s3_client(location))
