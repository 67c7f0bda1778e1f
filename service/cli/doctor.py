"""``cloister doctor``: check a cluster, a stack and its API."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import DEFAULT_DATA_DIR, ClientDataDir, parse_duration
from service.client.exit_codes import CommandError, ExitCode
from service.doctor.api import check_api
from service.doctor.findings import Report, run_check
from service.doctor.viewpoints import Viewpoint, look_from_cluster, look_from_pods


def doctor(
    *,
    context: Annotated[str, typer.Option(help="The context of the kubeconfig.", show_default=False)] = "",
    kubeconfig: Annotated[
        Path | None, typer.Option(help="The kubeconfig. Default: $KUBECONFIG or ~/.kube/config.", show_default=False)
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="The service namespace of the stack, e.g. cloister-acme-prod.", show_default=False)
    ] = "",
    storage_class: Annotated[
        str,
        typer.Option(help="The storage class in the stack file. Default: that of the cluster.", show_default=False),
    ] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="Send a batch to this model only. May be repeated. Default: all models.")
    ] = None,
    batch: Annotated[bool, typer.Option(help="Send a batch of one line to each model.")] = True,
    time_limit: Annotated[
        str, typer.Option(metavar="45m", help="The time limit of one batch, including the start of GPU nodes.")
    ] = "45m",
    only: Annotated[
        list[Viewpoint] | None, typer.Option(help="Check from this viewpoint only. May be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, the counts last.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Check cluster, stack and API, and report how to correct what is wrong.

    --context or --kubeconfig selects a cluster to check. With --namespace, the command also checks
    the stack in it, and runs checks inside its pods with kubectl. If a server and its API key are
    set (with --context, in the environment only), it sends a batch of one line to each model.

    Findings that are not checked give the reason. The exit code is 0 if a check passed and none
    failed, else 1.
    """
    viewpoints = only or list(Viewpoint)
    report = Report(as_json=as_json)
    limit_s = parse_duration(time_limit).total_seconds()
    # A server that happens to run on this machine has nothing to do with another cluster.
    local = None if kubeconfig or context else data_dir
    try:
        if Viewpoint.CLUSTER in viewpoints:
            findings = run_check(
                "cluster", look_from_cluster, kubeconfig, context, namespace=namespace, storage_class=storage_class
            )
            report.add("as the user of the kubeconfig", findings)
        if Viewpoint.POD in viewpoints:
            for place, findings in look_from_pods(kubeconfig, context, namespace=namespace, is_requested=bool(only)):
                report.add(place, findings)
        if Viewpoint.API in viewpoints:
            findings = run_check(
                "API", check_api, local, models=model or (), with_batches=batch, time_limit_s=limit_s, quiet=as_json
            )
            report.add("as a client of the API", findings)
    except KeyboardInterrupt:
        raise CommandError("interrupted: the report is incomplete", ExitCode.INTERRUPTED) from None
    report.end()
    raise typer.Exit(ExitCode.OK if report.is_good else ExitCode.ERROR)
