"""The keys of every object that cloister keeps in its object store.

files/{file_id}                       an uploaded or assembled file, as the client sees it
batches/{batch_id}/parts/{part_id}    the results of some lines of a batch
"""


def file_key(file_id: str) -> str:
    """The key of a file's content."""
    return f"files/{file_id}"


def batch_prefix(batch_id: str) -> str:
    """The prefix of all that a batch leaves behind besides its files."""
    return f"batches/{batch_id}/"


def parts_prefix(batch_id: str) -> str:
    """The prefix of a batch's part objects."""
    return f"{batch_prefix(batch_id)}parts/"


def part_key(batch_id: str, part_id: str) -> str:
    """The key of one part object."""
    return f"{parts_prefix(batch_id)}{part_id}"
