"""Privileges of the service's role, which logs in to a database that another role owns.

The owner runs the migrations. The service reads and writes rows. It can add to the audit log, to its seals and to the
receipts of deletions, and cannot change or delete what they hold: it owns no table, so it cannot disable their triggers
either.
"""

from collections.abc import Sequence
from typing import Final, LiteralString

import psycopg
from psycopg import sql

from service.db import MIGRATION_LOCK
from service.errors import SettingsError

_ROLE: Final = "SELECT pg_has_role(oid, current_user, 'MEMBER') FROM pg_roles WHERE rolname = %s"
# Only what this role owns: extensions of an administrator may be in the same schema.
_RELATIONS: Final = """
SELECT relname FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relowner = current_user::regrole AND relkind = ANY (%s)
"""
_FUNCTIONS: Final = """
SELECT oid::regprocedure::text FROM pg_proc
WHERE pronamespace = 'public'::regnamespace AND proowner = current_user::regrole
"""
# The service cannot choose the number and the id of an entry.
_AUDIT_COLUMNS: Final = """
SELECT attname FROM pg_attribute
WHERE attrelid = 'audit_log'::regclass AND attnum > 0 AND NOT attisdropped AND attname NOT IN ('seq', 'id')
"""
_GRANTS: Final = (
    # Before Postgres 15, everyone could create objects in the schema, among them functions that the owner then runs.
    "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
    "GRANT CONNECT ON DATABASE {database} TO {role}",
    "GRANT USAGE ON SCHEMA public TO {role}",
    "REVOKE ALL ON {tables} FROM {role}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {role}",
    "REVOKE INSERT, UPDATE, DELETE ON audit_log FROM {role}",
    "GRANT INSERT ({audit_columns}) ON audit_log TO {role}",
    "REVOKE UPDATE, DELETE ON audit_seals, receipts FROM {role}",
    "REVOKE INSERT, UPDATE, DELETE ON migrations FROM {role}",
    "GRANT USAGE ON SEQUENCE {sequences} TO {role}",
    "GRANT EXECUTE ON FUNCTION {functions} TO {role}",
)


def create_role_of_rds(connection: psycopg.Connection, role: str) -> None:
    """Create the service's role at a server of RDS, if it is missing. It has no password and logs in by an identity.

    Source: https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/UsingWithRDS.IAMDBAuth.DBAccounts.html.
    """
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
    if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    connection.execute(sql.SQL("GRANT rds_iam TO {}").format(sql.Identifier(role)))


def grant_service_role(connection: psycopg.Connection, role: str) -> None:
    """Grant the service's role what it needs of the schema as it is now, and revoke everything else.

    Run it after every migration, in a transaction of the owner. Running sessions of the role notice no gap.

    Raises:
        SettingsError: the role does not exist, or can act as the owner, so that no privilege would limit it.
    """
    found = connection.execute(_ROLE, [role]).fetchone()
    if found is None:
        raise SettingsError(
            f"CLOISTER_DATABASE_SERVICE_ROLE: the role {role} does not exist. Create it as the administrator of the "
            "server: CREATE ROLE … LOGIN PASSWORD '…'"
        )
    if found[0]:
        raise SettingsError(
            f"CLOISTER_DATABASE_SERVICE_ROLE: {role} is the owner of the database, a member of the owner's role or a "
            "superuser, so it could change the audit log. Create a role without these rights for the service"
        )
    # Two grants at a time fail with "tuple concurrently updated".
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])

    def named(query: LiteralString, *values: Sequence[str]) -> sql.Composed:
        return sql.SQL(", ").join(sql.Identifier(name) for (name,) in connection.execute(query, values))

    names = {
        "database": sql.Identifier(connection.info.dbname),
        "role": sql.Identifier(role),
        "tables": named(_RELATIONS, ["r", "p", "v", "m"]),
        "sequences": named(_RELATIONS, ["S"]),
        "audit_columns": named(_AUDIT_COLUMNS),
        # Postgres quotes these names itself; they have arguments.
        "functions": sql.SQL(", ").join(sql.SQL(name) for (name,) in connection.execute(_FUNCTIONS)),
    }
    for grant in _GRANTS:
        connection.execute(sql.SQL(grant).format(**names))
