"""What a cluster must have before a stack comes: version, storage, metrics, KubeRay."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, Final

from ray_job.contract.rayjobs import GROUP, VERSION
from service.adapters.rayjobs_api import NOT_FOUND
from service.cli.doctor.cluster_api import ClusterApi, ClusterError, JsonObject
from service.cli.doctor.findings import Finding, failed, not_checked, ok

OLDEST_KUBERNETES: Final = (1, 30)
OLDEST_KUBERAY: Final = (1, 6)
"""The first version with ``preRunningDeadlineSeconds``, without which a job whose image is missing waits for ever."""
_RAYJOB_FIELDS: Final = ("preRunningDeadlineSeconds", "deletionStrategy")
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
# Its chart sets both, under another release's name the first only.
_OPERATOR: Final = (
    {"labelSelector": "app.kubernetes.io/name=kuberay-operator"},
    {"fieldSelector": "metadata.name=kuberay-operator"},
)
_INSTALL_KUBERAY: Final = (
    "Let one stack of the cluster install it (`kuberay.install: helm`), or install its chart 1.6.1"
)


def kubernetes_version(api: ClusterApi) -> Iterator[Finding]:
    """The API server's version."""
    yield judge_version(str(api.read("/version").get("gitVersion", "")), api.server)


def judge_version(told: str, server: str) -> Finding:
    """Whether a stack runs on it."""
    version = numbers(told)
    oldest = ".".join(map(str, OLDEST_KUBERNETES))
    if not version or version[0] == 0:
        return not_checked("Kubernetes", f"{server} tells no version ({told}); a stack needs {oldest} or newer")
    if version < OLDEST_KUBERNETES:
        return failed("Kubernetes", f"{server} has {told}; a stack needs {oldest} or newer: upgrade it")
    return ok("Kubernetes", f"{server} has {told}")


def storage_class(api: ClusterApi, wanted: str, claims: Iterable[JsonObject] | None) -> Iterator[Finding]:
    """The storage class of the stack's volumes.

    Args:
        api: the cluster.
        wanted: its name; empty for the cluster's default.
        claims: the volume claims of the stack; None where it is not there yet.
    """
    if claims is not None:
        phases = {each["metadata"]["name"]: each.get("status", {}).get("phase", "Pending") for each in claims}
        if waiting := [name for name, phase in phases.items() if phase != "Bound"]:
            yield failed(
                "volumes",
                f"not bound: {', '.join(waiting)}. `kubectl describe persistentvolumeclaim` says why: no such storage "
                "class, or no room",
            )
        elif phases:
            yield ok("volumes", f"bound: {', '.join(phases)}")
    classes = {each["metadata"]["name"]: each for each in api.items("/apis/storage.k8s.io/v1/storageclasses")}
    there = f"There are: {', '.join(classes)}" if classes else "There is none at all"
    default = [name for name, each in classes.items() if _annotation(each, _DEFAULT_CLASS) == "true"]
    if wanted and wanted not in classes:
        yield failed("storage class", f"there is no {wanted}. {there}")
    elif wanted:
        yield ok("storage class", f"{wanted}, by {classes[wanted].get('provisioner')}")
    elif default:
        yield ok("storage class", f"{default[0]} is the default, by {classes[default[0]].get('provisioner')}")
    elif claims is not None:
        yield not_checked(
            "storage class", f"none is the default, and this stack needs none beyond its volumes. {there}"
        )
    else:
        yield failed(
            "storage class",
            f"none is the default. {there}. Mark one: `kubectl annotate storageclass NAME {_DEFAULT_CLASS}=true`; or "
            "name one in the stack file, here by --storage-class. A stack with its own Postgres and S3 needs none",
        )


def metrics(api: ClusterApi) -> Iterator[Finding]:
    """The API that the autoscaler of API pods reads."""
    try:
        api.read("/apis/metrics.k8s.io/v1beta1/nodes")
    except ClusterError as error:
        is_there = error.status != NOT_FOUND
        what_to_do = f"See that the pods of metrics-server run: {error}" if is_there else "Install metrics-server"
        yield failed("metrics", f"metrics.k8s.io does not answer: the number of API pods stays as it is. {what_to_do}")
    else:
        yield ok("metrics", "metrics.k8s.io answers")


def kuberay(api: ClusterApi, jobs_namespace: str, *, is_deployed: bool) -> Iterator[Finding]:
    """KubeRay's definitions, and its operator wherever it runs.

    Args:
        api: the cluster.
        jobs_namespace: where the stack's RayJobs are; empty where that is not known.
        is_deployed: whether the stack is there; before, it may be the one that installs KubeRay.
    """
    definition = api.find(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayjobs.{GROUP}")
    found = [each for selector in _OPERATOR for each in api.items("/apis/apps/v1/deployments", **selector)]
    operators = list({_place(each): each for each in found}.values())
    if definition is None and not operators and not is_deployed:
        yield not_checked("KubeRay", "it is not there. `pulumi up` installs it, but for `kuberay.install: none`")
        return
    yield judge_definition(definition)
    yield from judge_operators(operators, jobs_namespace)


def judge_definition(crd: JsonObject | None) -> Finding:
    """Whether the definition of RayJob has what our templates say."""
    check = "KubeRay's definitions"
    if crd is None:
        return failed(check, f"there is no kind RayJob. {_INSTALL_KUBERAY}")
    served = {each["name"]: each for each in crd["spec"]["versions"] if each.get("served")}
    if VERSION not in served:
        return failed(check, f"RayJob is not served as {VERSION}, only as {', '.join(served)}. {_INSTALL_KUBERAY}")
    schema = served[VERSION].get("schema", {}).get("openAPIV3Schema", {}).get("properties", {})
    fields = schema.get("spec", {}).get("properties", {})
    if lacking := [name for name in _RAYJOB_FIELDS if name not in fields]:
        return failed(
            check,
            f"RayJob has no {' and no '.join(lacking)}: the definitions are older than "
            f"{'.'.join(map(str, OLDEST_KUBERAY))}. Helm does not upgrade them: apply those of the operator's version",
        )
    return ok(check, f"RayJob {VERSION} with {', '.join(_RAYJOB_FIELDS)}")


def judge_operators(deployments: list[JsonObject], jobs_namespace: str) -> Iterator[Finding]:
    """Whether one operator looks at the stack's jobs, runs, and is of a version that works."""
    check = "KubeRay's operator"
    watching = [each for each in deployments if _watches(each, jobs_namespace)]
    if not deployments:
        yield failed(check, f"no Deployment is named or labelled kuberay-operator. {_INSTALL_KUBERAY}")
    elif not watching:
        names = ", ".join(map(_place, deployments))
        yield failed(
            check, f"{names} watches other namespaces only: add {jobs_namespace} to its chart's watchNamespace"
        )
    elif len(watching) > 1:
        names = " and ".join(map(_place, watching))
        if any(_overlap(one, other) for one, other in combinations(watching, 2)):
            yield failed(check, f"{names} watch the same namespaces, and undo each other's work: keep one")
        else:
            yield not_checked(check, f"{names} watch different namespaces; --namespace tells which is yours")
    for deployment in watching:
        version = operator_version(deployment) or "of a version that its labels do not tell"
        if problems := list(_operator_problems(deployment)):
            yield failed(check, f"{_place(deployment)} {version}: {'; '.join(problems)}")
        else:
            yield ok(check, f"{_place(deployment)} {version} runs")


def _operator_problems(deployment: JsonObject) -> Iterator[str]:
    version = operator_version(deployment)
    if version and numbers(version) < OLDEST_KUBERAY:
        yield f"it is older than {'.'.join(map(str, OLDEST_KUBERAY))}; upgrade its chart"
    if not deployment.get("status", {}).get("availableReplicas"):
        yield "no pod of it is available; `kubectl describe` and its log say why"
    if "RayJobDeletionPolicy=false" in _option(deployment, "--feature-gates"):
        yield "its feature gate RayJobDeletionPolicy is off: no Ray cluster of a batch would ever be deleted"


def _watches(deployment: JsonObject, namespace: str) -> bool:
    watched = _watched(deployment)
    return not watched or not namespace or namespace in watched


def _overlap(one: JsonObject, other: JsonObject) -> bool:
    watched = _watched(one), _watched(other)
    return not all(watched) or not watched[0].isdisjoint(watched[1])


def _watched(deployment: JsonObject) -> set[str]:
    """The namespaces that an operator watches; none for all."""
    return {each for each in _option(deployment, "--watch-namespace").split(",") if each}


def _place(deployment: JsonObject) -> str:
    return f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"


def operator_version(deployment: Mapping[str, Any]) -> str:
    """By the chart's labels, or else the image's tag; empty where neither tells."""
    labels = deployment["metadata"].get("labels", {})
    image = str(deployment["spec"]["template"]["spec"]["containers"][0].get("image", ""))
    tag = "" if "@" in image else image.rpartition(":")[2]
    for told in (labels.get("app.kubernetes.io/version", ""), labels.get("helm.sh/chart", ""), tag):
        if found := re.search(r"\d+\.\d+\.\d+", told):
            return found[0]
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """``v1.35.3+k3s1`` → (1, 35)."""
    found = re.search(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()


def _option(deployment: JsonObject, name: str) -> str:
    """The value of a command line's option; empty without it."""
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    # The chart writes some as one argument, and some as two.
    words = " ".join([*container.get("command", []), *container.get("args", [])])
    found = re.search(rf"{name}[= ](\S+)", words)
    return found[1] if found else ""


def _annotation(body: JsonObject, name: str) -> str:
    return str((body["metadata"].get("annotations") or {}).get(name, ""))
