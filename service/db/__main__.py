"""``python -m service.db``: migrate the schema, close the database to other roles, and grant the service's role.

It runs before every rollout of the service, as the owner of the database. Settings: CLOISTER_DATABASE_URL of the owner,
and CLOISTER_DATABASE_SERVICE_ROLE, the role that the service logs in with. Without the latter, the service logs in as
the owner, which can change the audit log.
"""

import os
import sys
from collections.abc import Mapping

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from service.db import migrate
from service.db.roles import grant_service_role
from service.errors import CloisterError, SettingsError

_CONNECT_TIMEOUT_S = 10


def run(environment: Mapping[str, str]) -> list[str]:
    """Migrate the schema, revoke what Postgres grants to everyone on a new database, and grant the service's role.

    Return the names of the migrations that ran.

    Raises:
        SettingsError: a setting is missing or invalid, the service's role does not exist or could act as the owner, or
            the database is unreachable.
    """
    url = environment.get("CLOISTER_DATABASE_URL")
    if not url:
        raise SettingsError("CLOISTER_DATABASE_URL must be set")
    try:
        done = migrate(url, connect_timeout=_CONNECT_TIMEOUT_S)
        with psycopg.connect(url, connect_timeout=_CONNECT_TIMEOUT_S) as connection:
            database = sql.Identifier(connection.info.dbname)
            connection.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(database))
            if role := environment.get("CLOISTER_DATABASE_SERVICE_ROLE"):
                grant_service_role(connection, role)
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
