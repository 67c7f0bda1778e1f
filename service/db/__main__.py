"""``python -m service.db``: brings the schema up to date and gives the role of jobs its one right.

Runs before every rollout of the service, as the owner of the database. Settings: CLOISTER_DATABASE_URL, as the service
has it, and CLOISTER_JOB_ROLE, the role that jobs log in as, which exists already.
"""

import os
import sys
from collections.abc import Mapping

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from service.db import migrate
from service.errors import CloisterError, SettingsError

_CONNECT_TIMEOUT_S = 10


def limit_job_role(database_url: str, role: str) -> None:
    """Lets a role connect and execute ``report_progress``, and takes from everyone else what Postgres gives to all.

    Raises:
        SettingsError: there is no such role, or it owns the database.
    """
    with psycopg.connect(database_url, connect_timeout=_CONNECT_TIMEOUT_S) as connection:
        row = connection.execute("SELECT current_database(), current_user").fetchone()
        database, owner = row or ("", "")
        if role == owner:
            raise SettingsError(f"CLOISTER_JOB_ROLE: {role} owns the database; jobs need a role of their own")
        if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
            raise SettingsError(
                f"CLOISTER_JOB_ROLE: the database has no role {role}; as its administrator: CREATE ROLE {role} LOGIN"
            )
        names = {"database": sql.Identifier(database), "role": sql.Identifier(role)}
        for statement in (
            "REVOKE ALL ON DATABASE {database} FROM PUBLIC",
            "GRANT CONNECT ON DATABASE {database} TO {role}",
            "GRANT EXECUTE ON FUNCTION report_progress TO {role}",
        ):
            connection.execute(sql.SQL(statement).format(**names))


def run(environment: Mapping[str, str]) -> list[str]:
    """Migrates and sets the rights; returns the names of the migrations that ran.

    Raises:
        SettingsError: a setting is missing or wrong, or the database cannot be reached.
    """
    missing = [name for name in ("CLOISTER_DATABASE_URL", "CLOISTER_JOB_ROLE") if not environment.get(name)]
    if missing:
        raise SettingsError(f"{' and '.join(missing)} must be set")
    url = environment["CLOISTER_DATABASE_URL"]
    try:
        done = migrate(url, connect_timeout=_CONNECT_TIMEOUT_S)
        limit_job_role(url, environment["CLOISTER_JOB_ROLE"])
    except psycopg.ProgrammingError:
        raise  # a migration that is wrong: its own words are the best
    except psycopg.OperationalError as error:
        host = conninfo_to_dict(url).get("host", "")
        raise SettingsError(f"the database at {host} does not answer: {error}") from error
    return done


def main() -> int:
    """Returns the exit status: 0, or 2 when a setting is wrong or the database does not answer."""
    try:
        done = run(os.environ)
    except CloisterError as error:
        sys.stderr.write(f"cloister migrations: {error}\n")
        return 2
    sys.stdout.write(f"migrations that ran: {', '.join(done) or 'none, the schema is up to date'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
