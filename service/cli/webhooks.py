"""``cloister webhooks``: where the projects of a stack want to hear of the end of their batches."""

from typing import Annotated

import typer

from service.cli.database import DEFAULT_DATA_DIR, DataDir, stack_database
from service.errors import CloisterError
from service.projects import DEFAULT_PROJECT_NAME, OPERATOR, find_project
from service.webhooks import EventType, create_endpoint, delete_endpoint, list_endpoints

app = typer.Typer(help="Webhook endpoints of a stack.", no_args_is_help=True)

ProjectOption = Annotated[str, typer.Option(help="The project, by name or id.")]


@app.command("create")
def create_webhook(
    url: Annotated[str, typer.Argument(help="Where each message is posted.")],
    *,
    project: ProjectOption = DEFAULT_PROJECT_NAME,
    event: Annotated[
        list[EventType] | None, typer.Option(help="What to hear of. May be repeated; every end of a batch by default.")
    ] = None,
    name: Annotated[str, typer.Option(help="Tells endpoints apart.")] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make an endpoint and show the secret that signs its messages, this once."""
    with stack_database(data_dir) as pool:
        owner = find_project(pool, project)
        endpoint, secret = create_endpoint(
            pool, project_id=owner.id, url=url, events=event or list(EventType), name=name, actor=OPERATOR
        )
    print(f"{endpoint.id}  {secret}")


@app.command("list")
def list_webhooks(*, project: ProjectOption = DEFAULT_PROJECT_NAME, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show a project's endpoints, the newest first."""
    with stack_database(data_dir) as pool:
        for endpoint in list_endpoints(pool, project_id=find_project(pool, project).id):
            created = f"{endpoint.created_at:%Y-%m-%d}"
            print(f"{endpoint.id}  {created}  {','.join(endpoint.events)}  {endpoint.url}  {endpoint.name}".rstrip())


@app.command("delete")
def delete_webhook(endpoint_id: str, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Delete an endpoint; what was still to be sent to it is not."""
    with stack_database(data_dir) as pool:
        if not delete_endpoint(pool, project_id=None, endpoint_id=endpoint_id, actor=OPERATOR):
            raise CloisterError(f"there is no webhook endpoint {endpoint_id}; see `cloister webhooks list`")
    print(f"deleted {endpoint_id}")
