"""``python -m service.db``: migrate the schema, close the database to other roles, and grant the service's role.

It runs before every rollout of the service, as the owner of the database. It also encrypts the secrets that an older
version stored in clear text. Settings: CLOISTER_DATABASE_URL of the owner; CLOISTER_DATABASE_SERVICE_ROLE, the role
that the service logs in with; and CLOISTER_ENCRYPTION_KEYS_FILE, the same as the service's. Without a role, the service
logs in as the owner, which can change the audit log.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from service.db import migrate
from service.db.login import connection_string, libpq_url, logs_in_at_rds
from service.db.roles import create_role_of_rds, grant_service_role
from service.errors import CloisterError, SettingsError
from service.stored_secrets import KEYS_VARIABLE, encrypt_stored_secrets, read_encryption_keys

_CONNECT_TIMEOUT_S = 10


def run(environment: Mapping[str, str]) -> list[str]:
    """Migrate the schema, close the database to others, encrypt secrets in clear text, and grant the service's role.

    Return the names of the migrations that ran.

    Raises:
        SettingsError: a setting is missing or invalid, the service's role does not exist or could act as the owner, or
            the database is unreachable.
    """
    url = environment.get("CLOISTER_DATABASE_URL")
    if not url:
        raise SettingsError("CLOISTER_DATABASE_URL must be set")
    keys_file = environment.get(KEYS_VARIABLE)
    keys = read_encryption_keys(Path(keys_file)) if keys_file else None
    try:
        done = migrate(url, connect_timeout=_CONNECT_TIMEOUT_S)
        with psycopg.connect(connection_string(url), connect_timeout=_CONNECT_TIMEOUT_S) as connection:
            database = sql.Identifier(connection.info.dbname)
            connection.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(database))
            encrypt_stored_secrets(connection, keys, only_clear=True)
            if role := environment.get("CLOISTER_DATABASE_SERVICE_ROLE"):
                if logs_in_at_rds(url):
                    create_role_of_rds(connection, role)
                grant_service_role(connection, role)
    except psycopg.ProgrammingError:
        raise  # a defect of a migration: Postgres reports it best
    except psycopg.OperationalError as error:
        host = conninfo_to_dict(libpq_url(url)).get("host", "")
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
