"""What the routes work with; ``create_app`` is handed it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Request

from service.db import Pool
from service.ports import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the routes work with.

    Attributes:
        pool: the database.
        store: the object store.
        models: the served models, with the time since when each is served.
        retention_s: how long files without an expiry of their own are kept, unless their project says otherwise.
    """

    pool: Pool
    store: ObjectStore
    models: Mapping[str, datetime]
    retention_s: int = 30 * 24 * 3600


def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


PartsDependency = Annotated[Parts, Depends(_parts)]
