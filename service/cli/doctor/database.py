"""The database as the settings name it: answers, schema, and a job role that can do one thing."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from service.cli.doctor.findings import Finding, failed, not_checked, ok
from service.db import migration_names, query
from service.settings import Settings

OLDEST_POSTGRES: Final = 15
_CONNECT_TIMEOUT_S: Final = 5
_LIMIT_S: Final = 10.0
_SETTING: Final = "CLOISTER_DATABASE_URL"


def database(settings: Settings, *, limit_s: float = _LIMIT_S) -> Iterator[Finding]:
    """Logs in once and looks at all of it.

    Args:
        settings: name the database.
        limit_s: how long one query may take, in seconds.
    """
    try:
        connection = psycopg.connect(settings.database_url, connect_timeout=_CONNECT_TIMEOUT_S, autocommit=True)
    except psycopg.Error as error:
        # libpq tells host, port, user and database, never the password.
        yield failed(
            "database",
            f"{_SETTING}: {_shown(error)}. See that Postgres runs, that a network policy lets this pod reach it, and "
            "that role, password (PGPASSFILE) and TLS are right",
        )
        return
    try:
        with connection:
            connection.execute("SELECT set_config('statement_timeout', %s, false)", [f"{limit_s * 1000:.0f}"])
            yield from _server(connection)
            yield from _schema(connection)
            yield from _job_role(connection, settings.job_database_url)
    except psycopg.Error as error:
        yield failed(
            "database",
            f"{_SETTING} lets in, but a query fails: {_shown(error)}. See that the role is the one that ran the "
            "migrations, and that nobody holds a lock",
        )


def _shown(error: psycopg.Error) -> str:
    return " ".join(str(error).split())


def _server(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    version = connection.info.server_version
    where = f"PostgreSQL {version // 10_000}.{version % 10_000} at {connection.info.host}:{connection.info.port}"
    problems = []
    if version < OLDEST_POSTGRES * 10_000:
        problems.append(f"a stack needs {OLDEST_POSTGRES} or newer: upgrade it")
    if (encoding := connection.info.parameter_status("server_encoding")) != "UTF8":
        problems.append(f"its encoding is {encoding}: make the database anew with ENCODING 'UTF8'")
    if _value(connection, "SELECT pg_is_in_recovery()"):
        problems.append(f"it is a standby, which takes no writes: name the primary in {_SETTING}")
    if problems:
        yield failed("database", f"{where}: {'; '.join(problems)}")
    else:
        yield ok("database", where)


def _schema(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    try:
        ran = {row[0] for row in connection.execute(query("migrations_that_ran"))}
    except psycopg.errors.UndefinedTable:
        ran = set()
    known = migration_names()
    if missing := [name for name in known if name not in ran]:
        yield failed(
            "migrations",
            f"these have not run: {', '.join(missing)}. `pulumi up` runs them as the Job migrations-…: see its log",
        )
    elif unknown := sorted(ran - set(known)):
        yield ok("migrations", f"all have run, and {', '.join(unknown)} of a newer version too")
    else:
        yield ok("migrations", f"all {len(known)} have run")


def _job_role(connection: psycopg.Connection[Any], job_database_url: str) -> Iterator[Finding]:
    check = "database role of jobs"
    role = conninfo_to_dict(job_database_url).get("user") if job_database_url else None
    if not role:
        yield not_checked(check, "CLOISTER_JOB_DATABASE_URL names no role: jobs report no progress")
        return
    values = {"role": role}
    if not connection.execute("SELECT FROM pg_roles WHERE rolname = %(role)s", values).rowcount:
        yield failed(check, f"the database has no role {role}, which CLOISTER_JOB_DATABASE_URL names; CREATE ROLE it")
        return
    if lacking := [row[0] for row in connection.execute(query("doctor_job_role_lacks"), values)]:
        yield failed(check, f"{role} cannot report progress. It lacks {', '.join(lacking)}: GRANT it, or ALTER ROLE")
        return
    excess = [row[0] for row in connection.execute(query("doctor_job_role_excess"), values)]
    if excess:
        yield failed(check, f"{role} may do more than report progress: {', '.join(excess)}. REVOKE it")
    else:
        yield ok(
            check,
            f"{role} may report progress, and nothing else here; whether its password is right stands in a job's log",
        )


def _value(connection: psycopg.Connection[Any], text: Any, values: Mapping[str, str | int] | None = None) -> Any:
    row = connection.execute(text, values).fetchone()
    return row[0] if row else None
