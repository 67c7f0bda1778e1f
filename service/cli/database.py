"""The database that the commands of an operator work on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import psycopg
import typer

from service.db import Pool, open_pool
from service.errors import CloisterError

DataDir = Annotated[Path, typer.Option(help="Where everything that lasts is kept.")]
DEFAULT_DATA_DIR: Final = Path("cloister-data")


@contextmanager
def stack_database(data_dir: Path) -> Iterator[Pool]:
    """The database of a running ``cloister local``, or any that CLOISTER_DATABASE_URL names."""
    from service.local.layout import layout_of

    named = os.environ.get("CLOISTER_DATABASE_URL")
    url = named or layout_of(data_dir).database_url("cloister")
    try:
        with psycopg.connect(url, connect_timeout=5):
            pass
    except psycopg.OperationalError as error:
        if named:
            raise CloisterError(f"the database that CLOISTER_DATABASE_URL names does not answer ({error})") from error
        raise CloisterError(
            f"no database answers for {data_dir}: start `cloister local --data-dir {data_dir}` first, "
            f"or set CLOISTER_DATABASE_URL ({error})"
        ) from error
    with open_pool(url, max_size=1) as pool:
        yield pool
