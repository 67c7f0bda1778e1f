"""``cloister doctor``: whether a cluster and a stack are as they must be, and what to do where they are not.

It looks from up to three places: as the user of a kubeconfig, in a pod of the stack, and through the API as a client.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from service.cli.client import ClientDataDir, find_server
from service.cli.database import DEFAULT_DATA_DIR
from service.cli.doctor.api import Trial, api_findings
from service.cli.doctor.findings import Finding, Report, failed, not_checked, told
from service.cli.doctor.inside import inside_findings
from service.cli.doctor.relay import DEPLOYMENTS, kubectl_exec, relayed
from service.cli.durations import parse_duration
from service.cli.exits import CommandError, ExitCode
from service.errors import SettingsError


class Part(StrEnum):
    """The places to look from."""

    CLUSTER = "cluster"
    POD = "pod"
    API = "api"


_FROM_CLUSTER: Final = "as the user of the kubeconfig"
_FROM_POD: Final = "in a pod of the stack"
_FROM_API: Final = "as a client of the API"


def doctor(
    *,
    context: Annotated[str, typer.Option(help="The context of the kubeconfig.", show_default=False)] = "",
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Instead of $KUBECONFIG or ~/.kube/config.", show_default=False)
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="The namespace of the stack's service, e.g. cloister-acme-prod.", show_default=False)
    ] = "",
    storage_class: Annotated[
        str, typer.Option(help="Of the stack file; without it the cluster's default.", show_default=False)
    ] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="Send a batch to this model only. May be repeated; all by default.")
    ] = None,
    batch: Annotated[bool, typer.Option(help="Send a batch of one line to each model.")] = True,
    time_limit: Annotated[
        str, typer.Option(metavar="45m", help="How long one batch may take, GPU nodes included.")
    ] = "45m",
    only: Annotated[
        list[Part] | None, typer.Option(help="Look from there only: cluster, pod or api. May be repeated.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, the last with the counts.")
    ] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Check cluster, stack and API, and say what to do about what is wrong.

    With --context or --kubeconfig the cluster is checked, with --namespace the stack in it too, and inside its pods by
    kubectl; where a server and its API key are named (then by the environment only), a batch of one line goes to each
    model. What cannot be checked is told. The exit code is 0 if something was checked and nothing failed, else 1.
    """
    parts = only or list(Part)
    report = Report(as_json=as_json)
    limit_s = parse_duration(time_limit).total_seconds()
    try:
        if Part.CLUSTER in parts:
            report.tell(_FROM_CLUSTER, told("cluster", lambda: _cluster(kubeconfig, context, namespace, storage_class)))
        if Part.POD in parts:
            for place, findings in _pods(kubeconfig, context, namespace, is_asked=bool(only)):
                report.tell(place, findings)
        if Part.API in parts:
            # A server that happens to run on this machine says nothing of a cluster elsewhere.
            near = None if kubeconfig or context else data_dir
            trial = Trial(data_dir=near, models=model or (), has_batches=batch, limit_s=limit_s, quiet=as_json)
            report.tell(_FROM_API, told("API", lambda: _api(trial)))
    except KeyboardInterrupt:
        raise CommandError("interrupted; what was not told was not checked", ExitCode.INTERRUPTED) from None
    report.end()
    raise typer.Exit(ExitCode.OK if report.is_good else ExitCode.ERROR)


def _cluster(kubeconfig: Path | None, context: str, namespace: str, storage_class: str) -> Iterator[Finding]:
    if not (kubeconfig or context):
        yield not_checked("cluster", "no cluster is named: give --context, and --namespace once there is a stack")
        return
    try:
        from service.cli.doctor.cluster import Wanted, cluster_findings
        from service.cli.doctor.cluster_api import ClusterApi, open_kubeconfig
    except ModuleNotFoundError as error:
        yield failed("cluster", f"the package {error.name} is missing: install cloister[cluster]")
        return
    try:
        api = ClusterApi(open_kubeconfig(kubeconfig, context))
    except SettingsError as error:
        yield failed("kubeconfig", str(error))
        return
    yield from cluster_findings(api, Wanted(namespace=namespace, storage_class=storage_class))


def _pods(
    kubeconfig: Path | None, context: str, namespace: str, *, is_asked: bool
) -> Iterator[tuple[str, Iterator[Finding]]]:
    """The places inside of the stack, and what is found there: here, or in its pods by kubectl."""
    if not (kubeconfig or context):
        if is_asked or os.environ.get("CLOISTER_OBJECT_STORE"):
            yield _FROM_POD, told("stack", lambda: inside_findings(os.environ))
        else:
            yield (
                _FROM_POD,
                iter([not_checked("stack", "no setting CLOISTER_… is set here, and no --context is given")]),
            )
    elif not namespace:
        yield _FROM_POD, iter([not_checked("stack", "no --namespace is given")])
    else:
        for deployment in DEPLOYMENTS:
            command = kubectl_exec(kubeconfig=kubeconfig, context=context, namespace=namespace, deployment=deployment)
            if shutil.which(command[0]):
                yield f"in a pod of {deployment}", told("doctor in the pod", partial(relayed, command))
            else:
                run = f"kubectl is not on PATH. Run: {shlex.join(command)}"
                yield f"in a pod of {deployment}", iter([not_checked("stack", run)])


def _api(trial: Trial) -> Iterator[Finding]:
    try:
        find_server(os.environ, trial.data_dir)
    except CommandError as error:
        yield not_checked("API", str(error))
        return
    yield from api_findings(trial)
