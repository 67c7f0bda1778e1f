"""Probes for whoever runs the service. They need no API key and tell nothing of what is stored."""

from fastapi import APIRouter

from service.api.parts import PartsDependency
from service.db import query

router = APIRouter()


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(parts: PartsDependency) -> dict[str, str]:
    """The database has its schema and the object store answers; 503 otherwise."""
    with parts.pool.connection() as connection:
        connection.execute(query("check_schema"))
    parts.store.check()
    return {"status": "ok"}
