"""Passwords that AWS gives: a token for one connection, or a secret that RDS changes."""

import json
from collections.abc import Iterator

import boto3
import psycopg
import pytest
from moto import mock_aws
from psycopg.conninfo import conninfo_to_dict

from service.db import open_pool
from service.db.__main__ import run
from service.db.login import connection_string, libpq_url
from service.settings import Settings

RDS = "postgresql://vela_service@db.rds.example:5433/vela?sslmode=verify-full&aws_iam_region=eu-central-1"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The ARN of a secret in a Secrets Manager of this process."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("secretsmanager", region_name="eu-central-1")
        yield client.create_secret(Name="owner", SecretString=json.dumps({"password": "first"}))["ARN"]


def change(secret: str, password: str) -> None:
    client = boto3.client("secretsmanager", region_name="eu-central-1")
    client.put_secret_value(SecretId=secret, SecretString=json.dumps({"password": password}))


@pytest.mark.usefixtures("secret")
def test_token_is_signed_for_role_and_server() -> None:
    found = conninfo_to_dict(connection_string(RDS))
    assert str(found["password"]).startswith("db.rds.example:5433/?Action=connect&DBUser=vela_service&")
    assert "X-Amz-Expires=900" in str(found["password"])
    assert found["sslmode"] == "verify-full"


def test_each_connection_has_the_password_of_its_moment(secret: str) -> None:
    url = f"postgresql://vela@db.rds.example/vela?sslmode=verify-full&aws_secret_arn={secret}"
    assert conninfo_to_dict(connection_string(url))["password"] == "first"
    change(secret, "second")
    assert conninfo_to_dict(connection_string(url))["password"] == "second"


def test_other_connection_strings_stay_as_they_are() -> None:
    url = "host=/run/postgres dbname=vela user=vela"
    assert connection_string(url) == libpq_url(url) == url


@pytest.mark.usefixtures("secret")
def test_missing_secret_is_an_error_of_the_connection_without_content() -> None:
    url = "postgresql://vela@db/vela?aws_secret_arn=arn:aws:secretsmanager:eu-central-1:123456789012:secret:none-abc"
    with pytest.raises(psycopg.OperationalError, match="AWS gives no password for the database: ResourceNotFound"):
        connection_string(url)


def test_settings_accept_the_parameters() -> None:
    assert Settings._check_connection_string(RDS) == RDS


def test_migrations_create_the_service_role_at_rds(database_url: str, secret: str) -> None:
    """The server of the test ignores the password; the roles and their rights are real."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for role in ("rds_iam", "vela_service"):
            connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute("CREATE ROLE rds_iam NOLOGIN")
    url = f"{database_url}&aws_secret_arn={secret}"
    try:
        for _ in range(2):
            run({"CLOISTER_DATABASE_URL": url, "CLOISTER_DATABASE_SERVICE_ROLE": "vela_service"})
        with open_pool(url) as pool, pool.connection() as connection:
            row = connection.execute(
                "SELECT pg_has_role('vela_service', 'rds_iam', 'MEMBER') AS iam, rolcanlogin, rolsuper, "
                "has_table_privilege('vela_service', 'batches', 'UPDATE') AS writes FROM pg_roles "
                "WHERE rolname = 'vela_service'"
            ).fetchone()
        assert row == {"iam": True, "rolcanlogin": True, "rolsuper": False, "writes": True}
    finally:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("DROP OWNED BY vela_service")
            connection.execute("DROP ROLE vela_service, rds_iam")
