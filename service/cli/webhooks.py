"""``cloister webhooks`` and ``cloister secrets``: webhook endpoints, and the encryption of their secrets."""

from ipaddress import ip_network
from typing import Annotated

import typer

from service.cli.database import Operator, operator_actor, stack_database, stack_encryption_keys
from service.cli.options import DEFAULT_DATA_DIR, DataDir
from service.errors import CloisterError
from service.projects import DEFAULT_PROJECT_NAME, find_project
from service.stored_secrets import encrypt_stored_secrets
from service.webhooks import EventType, create_endpoint, delete_endpoint, list_endpoints

webhooks = typer.Typer(help="Manage the webhook endpoints of a stack.", no_args_is_help=True)
secrets = typer.Typer(help="Manage the encryption of the secrets in a stack's database.", no_args_is_help=True)

Project = Annotated[str, typer.Option(help="The project, by name or id.")]


@webhooks.command("create")
def create_webhook(
    url: Annotated[str, typer.Argument(help="The URL that receives the messages.")],
    *,
    project: Project = DEFAULT_PROJECT_NAME,
    event: Annotated[
        list[EventType] | None,
        typer.Option(help="An event to send. May be repeated. Default: every end of a batch."),
    ] = None,
    name: Annotated[str, typer.Option(help="A name for the endpoint.")] = "",
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create an endpoint and print its id and the secret that signs its messages. The secret cannot be shown again."""
    with stack_database(data_dir) as pool:
        owner = find_project(pool, project)
        endpoint, secret = create_endpoint(
            pool,
            stack_encryption_keys(data_dir),
            project_id=owner.id,
            url=url,
            events=event or list(EventType),
            name=name,
            actor=operator_actor(operator),
            # The reconciler checks the address before each message; this command may run elsewhere.
            networks=(ip_network("0.0.0.0/0"), ip_network("::/0")),
        )
    print(f"{endpoint.id}  {secret}")


@webhooks.command("list")
def list_webhooks(*, project: Project = DEFAULT_PROJECT_NAME, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """List the endpoints of a project, the newest first."""
    with stack_database(data_dir) as pool:
        for endpoint in list_endpoints(pool, project_id=find_project(pool, project).id):
            created = f"{endpoint.created_at:%Y-%m-%d}"
            print(f"{endpoint.id}  {created}  {','.join(endpoint.events)}  {endpoint.url}  {endpoint.name}".rstrip())


@webhooks.command("delete")
def delete_webhook(
    endpoint_id: Annotated[str, typer.Argument(help="The id of the endpoint.")],
    *,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete an endpoint and its pending messages."""
    with stack_database(data_dir) as pool:
        actor = operator_actor(operator)
        if not delete_endpoint(pool, project_id=None, endpoint_id=endpoint_id, actor=actor):
            raise CloisterError(f"there is no webhook endpoint {endpoint_id}; `cloister webhooks list` lists them")
    print(f"deleted {endpoint_id}")


@secrets.command("rotate")
def rotate_secrets(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Encrypt all webhook secrets again, under the first key in CLOISTER_ENCRYPTION_KEYS_FILE.

    Put a new key first in the file and keep the old one. Once the processes have restarted, run this; then remove the
    old key.
    """
    with stack_database(data_dir) as pool, pool.connection() as connection:
        count = encrypt_stored_secrets(connection, stack_encryption_keys(data_dir))
    print(f"webhook secrets encrypted under the first key: {count}")
