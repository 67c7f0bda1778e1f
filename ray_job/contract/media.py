"""Images that a request names by the id of an uploaded file: the service checks the ids, and the job reads the files.

{"type": "image_url", "image_url": {"file_id": "file-…", "detail": "low"}}
"""

import base64
from collections.abc import Iterator
from typing import Any, Final

MAX_FILE_BYTES: Final = 20 << 20
MAX_FILES: Final = 50
"""Most images of one line that are uploaded files."""
MAX_LINE_BYTES: Final = 64 << 20
"""Most bytes of the uploaded files of one line."""
HEAD_BYTES: Final = 12
"""Bytes at the beginning of an image that show its type."""
MIN_TOKENS: Final = 256
"""The fewest tokens that an image counts in a plan, so that a segment names some hundred files at most."""

# Source: https://mimesniff.spec.whatwg.org/#matching-an-image-type-pattern
_SIGNATURES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


def file_images(body: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the ``image_url`` object of each image that is an uploaded file.

    Args:
        body: the body of a request, or any other JSON value, which holds no image.
    """
    messages = body.get("messages") if isinstance(body, dict) else None
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
            if isinstance(image, dict) and isinstance(image.get("file_id"), str):
                yield f"body.messages[{number}].content[{index}].image_url", image


def image_type(head: bytes) -> str | None:
    """Return the media type of an image by its first ``HEAD_BYTES`` bytes: PNG, JPEG, GIF or WebP; None for others."""
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    return next((found for signature, found in _SIGNATURES.items() if head.startswith(signature)), None)


def data_url(media_type: str, data: bytes) -> str:
    """Return the ``data:`` URL of an image."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def data_url_bytes(size_bytes: int) -> int:
    """Return the most bytes that the ``data:`` URL of an image of this size has."""
    return len("data:image/jpeg;base64,") + (size_bytes + 2) // 3 * 4
