"""Keys of the objects that cloister keeps in its object store.

files/{file_id}                       an uploaded or assembled file, as the client sees it
batches/{batch_id}/parts/{part_id}    the results of some lines of a batch
"""

import hashlib
from collections.abc import Sequence


def file_key(file_id: str) -> str:
    """Return the key of a file's content."""
    return f"files/{file_id}"


def batch_prefix(batch_id: str) -> str:
    """Return the prefix of all objects of a batch except its files."""
    return f"batches/{batch_id}/"


def parts_prefix(batch_id: str) -> str:
    """Return the prefix of a batch's part objects."""
    return f"{batch_prefix(batch_id)}parts/"


def part_key(batch_id: str, lines: Sequence[int]) -> str:
    """Return the key of one part object, which the line numbers determine: a repeated write replaces itself."""
    ordered = sorted(lines)
    digest = hashlib.sha256(",".join(map(str, ordered)).encode()).hexdigest()
    return f"{parts_prefix(batch_id)}{ordered[0]:08d}-{len(ordered):05d}-{digest[:16]}.part"
