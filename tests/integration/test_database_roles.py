"""The service's role: what it can do in a database that another role owns."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from service.db import Pool
from service.db.__main__ import run
from service.errors import SettingsError
from service.projects import create_project
from tests.conftest import SERVICE_ROLE

ADDED = ("audit_log", "audit_seals")


@pytest.mark.parametrize("table", ADDED)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE {} SET sha256 = NULL",
        "DELETE FROM {}",
        "TRUNCATE {}",
        "ALTER TABLE {} DISABLE TRIGGER ALL",
        "DROP TABLE {}",
        "CREATE TRIGGER other BEFORE INSERT ON {} FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()",
    ],
)
def test_service_cannot_change_the_audit_log(pool: Pool, table: str, statement: str) -> None:
    create_project(pool, "a")
    with pytest.raises(psycopg.errors.InsufficientPrivilege), pool.connection() as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(table)))


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE other (id bigint)",
        "CREATE FUNCTION now() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'",
        "DELETE FROM migrations",
        "SET session_replication_role = replica",
        "SET ROLE postgres",
    ],
)
def test_service_cannot_act_as_the_owner(pool: Pool, statement: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege), pool.connection() as connection:
        connection.execute(statement)  # type: ignore[arg-type]


@pytest.fixture
def roles(database_url: str) -> Iterator[tuple[str, str]]:
    """An owner of a database with the newest schema, and another role without any privilege."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE roles_owner LOGIN")
        connection.execute("CREATE ROLE roles_service LOGIN")
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public AUTHORIZATION roles_owner")
        database = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO roles_owner").format(database))
        owner_url = database_url.replace("postgres:@", "roles_owner:@")
        yield owner_url, database_url.replace("postgres:@", "roles_service:@")
        for role in ("roles_owner", "roles_service"):
            connection.execute(sql.SQL("REASSIGN OWNED BY {} TO postgres").format(sql.Identifier(role)))
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_migrations_grant_the_role_tables_of_later_versions(roles: tuple[str, str]) -> None:
    owner_url, service_url = roles
    settings = {"CLOISTER_DATABASE_URL": owner_url, "CLOISTER_DATABASE_SERVICE_ROLE": "roles_service"}
    run({"CLOISTER_DATABASE_URL": owner_url})
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        psycopg.connect(service_url)
    assert run(settings) == []
    with psycopg.connect(owner_url) as owner:
        owner.execute("CREATE TABLE later (id bigserial, name text)")
        owner.execute("CREATE FUNCTION later_number() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        owner.execute("REVOKE ALL ON FUNCTION later_number FROM PUBLIC")
    run(settings)
    with psycopg.connect(service_url) as service:
        service.execute("INSERT INTO later (name) VALUES ('a')")
        assert service.execute("DELETE FROM later RETURNING id, later_number()").fetchone() == (1, 1)


def test_objects_of_an_administrator_in_the_schema_are_left_alone(roles: tuple[str, str], database_url: str) -> None:
    owner_url, _ = roles
    with psycopg.connect(database_url) as administrator:
        administrator.execute("CREATE TABLE public.of_administrator (id bigint)")
    run({"CLOISTER_DATABASE_URL": owner_url, "CLOISTER_DATABASE_SERVICE_ROLE": "roles_service"})


@pytest.mark.parametrize(
    ("role", "problem"),
    [
        ("nobody", "the role nobody does not exist"),
        ("roles_owner", "could change the audit log"),
        ("postgres", "could"),
    ],
)
def test_role_that_would_not_be_limited_is_refused(roles: tuple[str, str], role: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        run({"CLOISTER_DATABASE_URL": roles[0], "CLOISTER_DATABASE_SERVICE_ROLE": role})


def test_tests_log_in_with_the_service_role(pool: Pool) -> None:
    with pool.connection() as connection:
        row = connection.execute("SELECT current_user AS name").fetchone()
    assert row == {"name": SERVICE_ROLE}
