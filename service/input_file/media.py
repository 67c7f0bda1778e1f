"""Media in the messages of a request: base64, ``data:`` URLs, and images that are uploaded files of the project.

An engine fetches a URL with its own access to the network, and follows redirects. So a URL in a line could reach what
its owner cannot reach, or carry the content of other lines out. The checks go by the names of fields and not by the
``type`` of a part, because engines accept parts without a type.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ray_job.contract.media import MAX_FILE_BYTES, MAX_FILES, MAX_LINE_BYTES, file_images
from service.input_file.errors import InputError, described

FileImage = tuple[str, str]
"""An image that is an uploaded file: its place in the line, and the id of the file."""

MESSAGE_FIELDS: Final = ("messages", "input")
"""Fields of a body with messages. In a request for embeddings, ``input`` may hold messages too."""

_DATA_URL: Final = "data:"
# Fields with a URL, besides those whose names end in _url.
_URL_FIELDS: Final = frozenset({"url", "image", "audio", "video"})
# Fields with base64, in which some servers accept a URL too. Base64 has no colon.
_BASE64_FIELDS: Final = frozenset({"data", "file_data"})
_TENSOR_FIELDS: Final = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
# Text with sources, which responses have and later requests repeat. No engine fetches them.
_SKIPPED_FIELDS: Final = frozenset({"annotations"})
_SHOWN_FIELDS: Final = frozenset(
    {"content", "file", "file_id", "uuid", "input_audio", "input_image", *_URL_FIELDS, *_BASE64_FIELDS, *_TENSOR_FIELDS}
)
_FILE_ID: Final = re.compile("file-[A-Za-z0-9_-]{1,64}")
_URL_NAME: Final = re.compile(r"[a-z]{1,20}(_[a-z]{1,20})?_url")
_TEXT_TYPES: Final = frozenset({str, int, float, bool, type(None)})


def has_only_own_media(body: Mapping[str, Any]) -> bool:
    """Return whether the messages of a body hold only text and ``data:`` URLs of images, in their usual form.

    Most do. This check is faster than ``media_errors``.
    """
    messages = body.get("messages")
    for message in messages if type(messages) is list else ():
        if type(message) is not dict:
            return False
        content = message.get("content")
        if type(content) is not str and (type(content) is not list or not all(map(_is_usual_part, content))):
            return False
    inputs = body.get("input")
    return type(inputs) is not dict and (type(inputs) is not list or _TEXT_TYPES.issuperset(map(type, inputs)))


def _is_usual_part(part: Any) -> bool:
    """Return whether a part of a message holds only text, or only the ``data:`` URL of an image."""
    if type(part) is not dict or len(part) != 2:  # noqa: PLR2004 - type, and the text or the image
        return False
    image = part.get("image_url")
    if type(image) is not dict:
        return type(part.get("text")) is str and type(part.get("type")) is str
    url = image.get("url")
    is_alone = len(image) == 1 or (len(image) == 2 and type(image.get("detail")) is str)  # noqa: PLR2004
    return is_alone and "type" in part and type(part["type"]) is str and type(url) is str and url.startswith(_DATA_URL)


def media_errors(body: Mapping[str, Any], line: int) -> Iterator[InputError]:
    """Yield an error for each part of a message that makes an engine fetch or deserialize something.

    Args:
        body: the body of the request.
        line: the number of its line.
    """
    # Values still to be looked at, the next one last: path, value, whether it is inside a message's content, and
    # whether it is a URL. No recursion, because a line may nest deeper than Python's stack.
    waiting = [(f"body.{name}", body.get(name), False, False) for name in reversed(MESSAGE_FIELDS)]
    by_file_id = {id(image) for _, image in file_images(body)}
    while waiting:
        path, value, is_content, is_url = waiting.pop()
        if isinstance(value, list):
            waiting += [
                (f"{path}[{index}]", value[index], is_content, is_url)
                for index in range(len(value) - 1, -1, -1)
                if is_url or isinstance(value[index], list | dict)
            ]
        elif isinstance(value, dict) and not is_content:
            waiting.append((f"{path}.content", value.get("content"), True, False))
        elif isinstance(value, dict):
            found = []
            for name, item in value.items():
                is_named = name in _SHOWN_FIELDS or _URL_NAME.fullmatch(name)
                place = f"{path}.{name}" if is_named else path if path.endswith(".…") else f"{path}.…"
                if item is None or name in _SKIPPED_FIELDS:
                    continue
                if name in _TENSOR_FIELDS:
                    message = "Serialized tensors are not supported. Send text, or media as a data: URL."
                    yield InputError(code="unsupported_parameter", message=message, param=place, line=line)
                elif name == "uuid":
                    message = "Media that an engine has cached cannot be named. Remove 'uuid', and send the media."
                    yield InputError(code="unsupported_parameter", message=message, param=place, line=line)
                elif name == "file_id" and id(value) in by_file_id:
                    if value.get("url") is not None:
                        message = "An image has either 'url' or 'file_id'. Remove one of them."
                        yield InputError(message=message, param=place, line=line)
                elif name == "file_id":
                    message = (
                        "Uploaded files are supported only as images of chat messages, in parts of type 'image_url' "
                        "with image_url.file_id. Send its content as a data: URL."
                    )
                    yield InputError(code="media_file_unsupported", message=message, param=place, line=line)
                elif name in _BASE64_FIELDS and isinstance(item, str):
                    if ":" in item and not item.startswith(_DATA_URL):
                        yield _not_data(place, item, line)
                else:
                    names_url = name in _URL_FIELDS or name.endswith("_url")
                    found.append((place, item, True, names_url and not isinstance(item, dict)))
            waiting += reversed(found)
        elif is_url and not (isinstance(value, str) and value.startswith(_DATA_URL)):
            yield _not_data(path, value, line)


def file_errors(images: Sequence[FileImage], sizes: Mapping[str, int], line: int) -> Iterator[InputError]:
    """Yield the errors of the images of a line that are uploaded files.

    A file of another project has the same error as one that does not exist.

    Args:
        images: the images of the line.
        sizes: sizes in bytes of the files that the line may name, by id.
        line: the number of the line.
    """
    total = 0
    for place, file_id in images:
        size = sizes.get(file_id)
        if size is None:
            message = "The project has no such file with purpose 'vision'. Upload the image with this purpose."
            yield InputError(code="media_file_not_found", message=message, param=f"{place}.file_id", line=line)
        elif size > MAX_FILE_BYTES:
            message = f"The file has {size:,} bytes; an image may have at most {MAX_FILE_BYTES:,}. Use a smaller one."
            yield InputError(code="media_files_too_large", message=message, param=f"{place}.file_id", line=line)
        total += size or 0
    if total > MAX_LINE_BYTES:
        message = f"The files have {total:,} bytes; those of a line may have at most {MAX_LINE_BYTES:,}. Use fewer."
        yield InputError(code="media_files_too_large", message=message, param="body.messages", line=line)


def has_file_id_form(text: str) -> bool:
    """Return whether a text can be the id of a file. Others need not be looked up."""
    return _FILE_ID.fullmatch(text) is not None


def too_many_files(count: int, line: int) -> InputError:
    """Return the error for a line that names more uploaded files than allowed."""
    message = f"The line names {count:,} uploaded files; at most {MAX_FILES} are allowed. Split the request."
    return InputError(code="too_many_media_files", message=message, param="body.messages", line=line)


def _not_data(place: str, value: Any, line: int) -> InputError:
    message = (
        f"Engines fetch no media: expected a data: URL, such as 'data:image/png;base64,…', but got {described(value)} "
        "instead. Send the content as a data: URL."
    )
    return InputError(code="media_url_unsupported", message=message, param=place, line=line)
