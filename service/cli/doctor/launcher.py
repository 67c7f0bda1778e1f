"""The reconciler's way to run jobs: its rights, the RayJob of each model, or a Ray that runs already."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.rayjobs import GROUP, PLURAL, VERSION
from service.adapters.open_launcher import open_launcher
from service.adapters.rayjob_templates import load_templates, rayjob
from service.cli.doctor.findings import Finding, RefusedError, failed, not_checked, ok
from service.errors import LauncherError, SettingsError
from service.model_catalogue import Catalogue
from service.settings import Settings

if TYPE_CHECKING:
    from service.cli.doctor.cluster_api import ClusterApi

_RAYJOBS: Final = f"{PLURAL}.{GROUP}"
MUST: Final = (*((verb, _RAYJOBS) for verb in ("create", "get", "list", "watch", "delete")), ("list", "pods"))
MUST_NOT: Final = (
    ("create", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("get", "secrets"),
    ("list", "secrets"),
    ("create", "serviceaccounts/token"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("update", "roles.rbac.authorization.k8s.io"),
    ("update", _RAYJOBS),
)
"""With any of these a pod that somebody else controls could take over the namespace of jobs."""


def launcher(settings: Settings, catalogue: Catalogue, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The launcher that the settings name, as far as nothing is started."""
    if not environment.get("CLOISTER_LAUNCHER"):
        yield not_checked(
            "launcher", "CLOISTER_LAUNCHER is not set here, as in pods of the API: the reconciler launches jobs"
        )
    elif settings.launcher == "kuberay":
        yield from _kuberay(settings, catalogue)
    else:
        yield from _ray_jobs(settings, catalogue, environment)


def _ray_jobs(settings: Settings, catalogue: Catalogue, environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        with open_launcher(settings, catalogue, environment) as opened:
            opened.status("doctor")
    except LauncherError as error:
        yield failed("launcher", f"CLOISTER_RAY_ADDRESS: {error}")
    else:
        yield ok("launcher", f"the Ray Jobs API at {settings.ray_address} answers")


def _kuberay(settings: Settings, catalogue: Catalogue) -> Iterator[Finding]:
    try:
        from service.adapters.rayjobs_api import open_client
        from service.cli.doctor.cluster_api import ClusterApi, ClusterError
    except ModuleNotFoundError as error:
        raise SettingsError(f"CLOISTER_LAUNCHER: kuberay needs the package {error.name}: cloister[cluster]") from error
    api = ClusterApi(open_client(settings.kubeconfig))
    namespace = settings.kubernetes_namespace
    yield judge_rights(api, namespace)
    with contextlib.redirect_stdout(sys.stderr):  # what it logs is none of the findings
        templates = load_templates(settings.ray_job_templates, catalogue, namespace=namespace)
    for model in catalogue.models.values():
        check = f"RayJob of the model {model.id}"
        if model.id not in templates:
            yield failed(
                check, "CLOISTER_RAY_JOB_TEMPLATES has no template of it: `pulumi up --refresh` makes it again"
            )
            continue
        spec = JobSpec(
            job_id="batch_doctor-1",
            batch_id="batch_doctor",
            attempt=1,
            endpoint=model.endpoints[0],
            input_key="files/doctor",
            object_store=settings.object_store,
            database_url=settings.job_database_url,
            model=model.spec,
        )
        try:
            api.try_to_create(
                f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}", rayjob(templates[model.id], spec)
            )
        except (RefusedError, ClusterError) as error:
            yield failed(check, f"the cluster refuses it (dry run): {error}")
        else:
            yield ok(check, f"its template fits the catalogue, and the cluster takes it in {namespace} (dry run)")


def judge_rights(api: "ClusterApi", namespace: str) -> Finding:
    """Whether the launcher's account may do what it must, and nothing that is dangerous."""
    lacking = [f"{verb} {resource}" for verb, resource in MUST if not api.may(verb, resource, namespace)]
    excess = [f"{verb} {resource}" for verb, resource in MUST_NOT if api.may(verb, resource, namespace)]
    if lacking:
        return failed(
            "launcher's rights",
            f"CLOISTER_LAUNCHER: its account may not {', '.join(lacking)} in {namespace}: `pulumi up --refresh` makes "
            "role and binding again",
        )
    if excess:
        return failed(
            "launcher's rights",
            f"its account may {', '.join(excess)} in {namespace}, which it need not: take the binding away",
        )
    return ok("launcher's rights", f"may run RayJobs in {namespace}; may not touch secrets, roles, or pods of its own")
