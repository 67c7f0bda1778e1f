"""New ids, in OpenAI's form. Lower-case hexadecimal, so that they can be a part of Kubernetes names and object keys."""

import secrets


def new_file_id() -> str:
    """An id that no other file has, e.g. ``file-0f3c…``."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """An id that no other batch has, e.g. ``batch_0f3c…``."""
    return f"batch_{secrets.token_hex(16)}"
