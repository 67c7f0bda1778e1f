"""``python -m service.db``: migrate the schema and grant the role of jobs its only right.

It runs before every rollout of the service, as the owner of the database. Settings: CLOISTER_DATABASE_URL, the same as
the service's, and CLOISTER_JOB_ROLE, the existing role that jobs log in as.
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


def run(environment: Mapping[str, str]) -> list[str]:
    """Migrate the schema, allow the role of jobs to connect and execute ``report_progress``, and nothing else.

    What Postgres grants to everyone is revoked. Return the names of the migrations that ran.

    Raises:
        SettingsError: a setting is missing or invalid, the database is unreachable, or the role does not exist or
            owns the database.
    """
    missing = [name for name in ("CLOISTER_DATABASE_URL", "CLOISTER_JOB_ROLE") if not environment.get(name)]
    if missing:
        raise SettingsError(f"{' and '.join(missing)} must be set")
    url, role = environment["CLOISTER_DATABASE_URL"], environment["CLOISTER_JOB_ROLE"]
    try:
        done = migrate(url, connect_timeout=_CONNECT_TIMEOUT_S)
        with psycopg.connect(url, connect_timeout=_CONNECT_TIMEOUT_S) as connection:
            row = connection.execute("SELECT current_database(), current_user").fetchone()
            database, owner = row or ("", "")
            if role == owner:
                raise SettingsError(f"CLOISTER_JOB_ROLE: {role} owns the database; jobs need a separate role")
            if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
                raise SettingsError(
                    f"CLOISTER_JOB_ROLE: the database has no role {role}; as its administrator: "
                    f"CREATE ROLE {role} LOGIN"
                )
            names = {"database": sql.Identifier(database), "role": sql.Identifier(role)}
            for statement in (
                "REVOKE ALL ON DATABASE {database} FROM PUBLIC",
                "GRANT CONNECT ON DATABASE {database} TO {role}",
                "GRANT EXECUTE ON FUNCTION report_progress TO {role}",
            ):
                connection.execute(sql.SQL(statement).format(**names))
    except psycopg.ProgrammingError:
        raise  # a defect of a migration: Postgres reports it best
    except psycopg.OperationalError as error:
        host = conninfo_to_dict(url).get("host", "")
        raise SettingsError(f"the database at {host} does not answer: {error}") from error
    return done


def main() -> int:
    """Return the exit status: 0, or 2 if a setting is invalid or the database does not answer."""
    try:
        done = run(os.environ)
    except CloisterError as error:
        sys.stderr.write(f"cloister migrations: {error}\n")
        return 2
    sys.stdout.write(f"migrations that ran: {', '.join(done) or 'none, the schema is up to date'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
