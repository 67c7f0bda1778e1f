"""Passwords of database roles that change by themselves: a connection string names where each connection gets its own.

Two parameters of a connection URL are the service's own, and libpq does not see them:

- ``aws_iam_region``: log in by the identity of the process. The password is a token for this one connection: it is
  signed here, without a request, and valid for 15 minutes, in which the connection must begin
  (https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/UsingWithRDS.IAMDBAuth.html).
- ``aws_secret_arn``: read the password from Secrets Manager, where RDS changes it
  (https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/rds-secrets-manager.html).

boto3 finds the identity of the process: of the pod, the machine, the environment.
"""

import functools
import json
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg.conninfo import make_conninfo

if TYPE_CHECKING:
    from collections.abc import Mapping

IAM_REGION: Final = "aws_iam_region"
SECRET_ARN: Final = "aws_secret_arn"  # noqa: S105 - the name of a parameter
_PORT: Final = 5432


def libpq_url(database_url: str) -> str:
    """Return a connection string as libpq knows it, without a password."""
    return _parted(database_url)[0]


def connection_string(database_url: str) -> str:
    """Return a connection string for one connection, with the password of this moment.

    A connection string without the service's own parameters is returned as it is.

    Raises:
        psycopg.OperationalError: AWS gives no password. Waiting may help, as with a server that does not answer.
    """
    url, options = _parted(database_url)
    if not options:
        return database_url
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(url)
    try:
        if region := options.get(IAM_REGION):
            password = _client("rds", region).generate_db_auth_token(
                DBHostname=parts.hostname or "",
                Port=parts.port or _PORT,
                DBUsername=unquote(parts.username or ""),
            )
        else:
            arn = options[SECRET_ARN]
            # The region is the fourth part of an ARN.
            answer = _client("secretsmanager", arn.split(":")[3]).get_secret_value(SecretId=arn)
            password = json.loads(answer["SecretString"])["password"]
    except (BotoCoreError, ClientError) as error:
        code = error.response["Error"].get("Code", "") if isinstance(error, ClientError) else type(error).__name__
        raise psycopg.OperationalError(
            f"AWS gives no password for the database: {code}. Check the role of this pod's service account"
        ) from error
    return make_conninfo(url, password=password)


def logs_in_at_rds(database_url: str) -> bool:
    """Return whether RDS keeps the password of the role, so that it is the administrator of a server of RDS."""
    return SECRET_ARN in _parted(database_url)[1]


def _parted(database_url: str) -> "tuple[str, Mapping[str, str]]":
    """Return a connection string without the service's own parameters, and these."""
    if IAM_REGION not in database_url and SECRET_ARN not in database_url:
        return database_url, {}
    parts = urlsplit(database_url)
    given = parse_qsl(parts.query, keep_blank_values=True)
    own = {name: value for name, value in given if name in (IAM_REGION, SECRET_ARN)}
    query = urlencode([(name, value) for name, value in given if name not in own], safe="/")
    return urlunsplit(parts._replace(query=query)), own


@functools.cache
def _client(service: Literal["rds", "secretsmanager"], region: str) -> Any:
    import boto3
    from botocore.config import Config

    limits = Config(connect_timeout=5, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 3})
    return boto3.client(service, region_name=region, config=limits)
