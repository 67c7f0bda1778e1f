"""Which keys every object store takes. The rules are those of the strictest store, a directory."""

from service.errors import ObjectStoreError


def check_key(key: str) -> None:
    """Refuses a key that could not be a relative path below a directory.

    Raises:
        ObjectStoreError: an empty segment, a segment that starts with a dot, or a NUL.
    """
    if "\0" in key or any(not segment or segment.startswith(".") for segment in key.split("/")):
        raise ObjectStoreError(
            f"the object key {key!r} is not allowed: no segment may be empty, start with a dot or hold a NUL"
        )
