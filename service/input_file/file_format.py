"""Files that are no JSONL at all: one error for the file says more than thousands for its lines."""

from typing import Final

from service.input_file.errors import InputError, invalid

_SIGNATURES: Final = {
    b"\x1f\x8b": "is compressed with gzip. Unpack it first (gunzip)",
    b"PK\x03\x04": "is a ZIP archive. Unpack it first (unzip)",
    b"PK\x05\x06": "is an empty ZIP archive",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Unpack it first (unzstd)",
    b"BZh": "is compressed with bzip2. Unpack it first (bunzip2)",
    b"\xfd7zXZ\x00": "is compressed with xz. Unpack it first (unxz)",
    b"PAR1": "is a Parquet file. Write its rows as lines of JSON",
    b"%PDF": "is a PDF",
    b"SQLite format 3": "is a SQLite database. Write its rows as lines of JSON",
    b"\xff\xfe\x00\x00": "is in UTF-32. Save it as UTF-8",
    b"\x00\x00\xfe\xff": "is in UTF-32. Save it as UTF-8",
    b"\xff\xfe": "is in UTF-16. Save it as UTF-8",
    b"\xfe\xff": "is in UTF-16. Save it as UTF-8",
    b"{\x00": "is in UTF-16. Save it as UTF-8",
    b"\x00{": "is in UTF-16. Save it as UTF-8",
}


def binary_format_error(first_line: bytes) -> InputError | None:
    """What a file is that starts with ``first_line`` and is plainly no text in UTF-8, or None."""
    for signature, what in _SIGNATURES.items():
        if first_line.startswith(signature):
            return invalid(None, f"The file {what}. A batch needs JSONL: one JSON object per line.", None)
    return None


def layout_error(first_line: bytes, *, has_objects: bool) -> InputError | None:
    """What the layout of a file is that holds JSON, but not one request on each line, or None.

    Args:
        first_line: the first line that is not blank.
        has_objects: whether any line is a JSON object by itself, like the last one of an array.
    """
    start = first_line.strip()
    if start.startswith(b"[") and not (has_objects and start.endswith(b"]")):
        what, command = "one JSON array", "jq -c '.[]'"
    elif not has_objects and (start == b"{" or (start.startswith(b"{") and start.endswith((b",", b"{", b"[")))):
        what, command = "JSON spread over several lines (pretty-printed)", "jq -c ."
    else:
        return None
    message = (
        f"The file is {what}. A batch needs JSONL: each request as one object on one line, with no array around them "
        f"and no commas between them, as `{command} FILE > FILE.jsonl` writes it."
    )
    return InputError(code="invalid_json_line", message=message)
