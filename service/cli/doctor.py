"""``cloister doctor``: check a cluster, a stack and its API."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import DEFAULT_DATA_DIR, ClientDataDir, parse_duration
from service.client.exit_codes import CommandError, ExitCode
from service.doctor.api import check_api
from service.doctor.findings import Finding, Report, run_check
from service.doctor.preflight.choices import Preflight
from service.doctor.preflight.egress import EXTERNAL, parse_destination
from service.doctor.preflight.stack_facts import StackFacts, read_stack_facts
from service.doctor.viewpoints import Viewpoint, look_from_cluster, look_from_pods, look_from_temporary_pods
from service.errors import SettingsError


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
    stack_file: Annotated[
        Path | None,
        typer.Option(
            help="The stack file, e.g. Pulumi.prod.yaml: also check with temporary pods. It names context and "
            "namespace.",
            show_default=False,
        ),
    ] = None,
    gpu_check: Annotated[bool, typer.Option("--gpu-check", help="Compute on a GPU of each GPU pool.")] = False,
    report_dir: Annotated[
        Path | None,
        typer.Option("--report", help="Write a report of what pods reach to this directory.", show_default=False),
    ] = None,
    external: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A destination that no pod may reach. May be repeated. Default: two on the internet, and the metadata "
            "services of clouds.",
            show_default=False,
        ),
    ] = None,
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

    --stack-file creates pods with the images of the stack in two temporary namespaces and removes
    them. It works before the first `pulumi up` and on a running stack. --gpu-check and --report
    need it.

    Findings that are not checked give the reason. The exit code is 0 if a check passed and none
    failed, else 1.
    """
    if (gpu_check or report_dir or external) and not stack_file:
        raise typer.BadParameter("--gpu-check, --report and --external need --stack-file")
    viewpoints, facts = only or list(Viewpoint), None
    preflight = Preflight(gpu=gpu_check, report=report_dir, external=external or EXTERNAL)
    if stack_file:
        facts = _read_facts(stack_file, preflight)
        if not (kubeconfig or context):
            kubeconfig, context = facts.kubeconfig, facts.context
        namespace = namespace or facts.namespace
        storage_class = storage_class or next(filter(None, facts.storage_classes.values()), "")
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
        if Viewpoint.PREFLIGHT in viewpoints and facts:
            findings = run_check("preflight", look_from_temporary_pods, kubeconfig, context, facts, preflight)
            report.add("from temporary pods", findings)
        elif Viewpoint.PREFLIGHT in viewpoints and (kubeconfig or context):
            report.add("from temporary pods", [Finding.not_checked("preflight", "no --stack-file is given")])
        if Viewpoint.API in viewpoints:
            findings = run_check(
                "API", check_api, local, models=model or (), with_batches=batch, time_limit_s=limit_s, quiet=as_json
            )
            report.add("as a client of the API", findings)
    except KeyboardInterrupt:
        raise CommandError("interrupted: the report is incomplete", ExitCode.INTERRUPTED) from None
    report.end()
    raise typer.Exit(ExitCode.OK if report.is_good else ExitCode.ERROR)


def _read_facts(stack_file: Path, preflight: Preflight) -> StackFacts:
    try:
        for each in preflight.external:
            parse_destination(each)
        return read_stack_facts(stack_file)
    except (SettingsError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
