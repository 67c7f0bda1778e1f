"""KubeRay in a cluster: its custom resource definitions, and the operator that runs the stack's RayJobs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, Self

from ray_job.contract.cluster import MIN_KUBERAY
from ray_job.contract.rayjobs import GROUP, PLURAL, VERSION
from service.doctor.cluster_api import ClusterApi
from service.doctor.findings import Finding

_MIN_VERSION: Final = ".".join(map(str, MIN_KUBERAY))
_RAYJOB_FIELDS: Final = ("preRunningDeadlineSeconds", "deletionStrategy")
# KubeRay's chart sets both, unless its release has another name: then only the label.
_OPERATOR_SELECTORS: Final = (
    {"labelSelector": "app.kubernetes.io/name=kuberay-operator"},
    {"fieldSelector": "metadata.name=kuberay-operator"},
)
_INSTALL: Final = "Let one stack of the cluster install KubeRay (`kuberay.install: helm`), or install its chart 1.6.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A Deployment of KubeRay's operator.

    Attributes:
        name: its namespace and name, ``kuberay/kuberay-operator``.
        version: its version; empty if labels and image do not show it.
        namespaces: the namespaces that it watches; empty for all.
        is_available: whether one of its pods is ready.
        has_deletion_policy: whether the feature gate is on that deletes the Ray clusters of jobs.
    """

    name: str
    version: str
    namespaces: frozenset[str]
    is_available: bool
    has_deletion_policy: bool

    @classmethod
    def parse(cls, deployment: Mapping[str, Any]) -> Self:
        """Parse a Deployment as the Kubernetes API returns it."""
        metadata, container = deployment["metadata"], deployment["spec"]["template"]["spec"]["containers"][0]
        labels, image = metadata.get("labels", {}), str(container.get("image", ""))
        version = ""
        tag = "" if "@" in image else image.rpartition(":")[2]
        for text in (labels.get("app.kubernetes.io/version", ""), labels.get("helm.sh/chart", ""), tag):
            if not version and (match := re.search(r"\d+\.\d+\.\d+", text)):
                version = match[0]
        # The chart passes some options as one argument and some as two.
        arguments = " ".join([*container.get("command", []), *container.get("args", [])])
        options = dict(re.findall(r"(--[\w-]+)[= ](\S+)", arguments))
        return cls(
            name=f"{metadata['namespace']}/{metadata['name']}",
            version=version,
            namespaces=frozenset(filter(None, options.get("--watch-namespace", "").split(","))),
            is_available=bool(deployment.get("status", {}).get("availableReplicas")),
            has_deletion_policy="RayJobDeletionPolicy=false" not in options.get("--feature-gates", ""),
        )

    def watches(self, namespace: str) -> bool:
        """Return whether the operator watches a namespace; an empty name is any."""
        return not self.namespaces or not namespace or namespace in self.namespaces

    def overlaps(self, other: "Operator") -> bool:
        """Return whether two operators watch the same namespace."""
        return not self.namespaces or not other.namespaces or bool(self.namespaces & other.namespaces)

    def problems(self) -> Iterator[str]:
        """Yield the reasons why the operator cannot run the stack's jobs."""
        if self.version and minor_version(self.version) < MIN_KUBERAY:
            yield f"it is older than {_MIN_VERSION}; upgrade its chart"
        if not self.is_available:
            yield "none of its pods is available; `kubectl describe` and its log show the reason"
        if not self.has_deletion_policy:
            yield "its feature gate RayJobDeletionPolicy is off: the Ray clusters of batches would never be deleted"


def minor_version(text: str) -> tuple[int, ...]:
    """Return major and minor version: (1, 35) of ``v1.35.3+k3s1``; empty if the text has none."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else ()


def check_kuberay(api: ClusterApi, jobs_namespace: str, *, is_deployed: bool) -> Iterator[Finding]:
    """Check that RayJob has the fields of the job templates, and that exactly one operator can run the stack's jobs.

    Args:
        api: the cluster.
        jobs_namespace: the namespace of the stack's RayJobs; empty if unknown.
        is_deployed: whether the stack exists. Before that, the stack may be the one that installs KubeRay.
    """
    definition = api.find(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}")
    found = [each for selector in _OPERATOR_SELECTORS for each in api.items("/apis/apps/v1/deployments", **selector)]
    operators = {operator.name: operator for operator in map(Operator.parse, found)}
    if definition is None and not operators and not is_deployed:
        yield Finding.not_checked(
            "KubeRay", "it is not installed. `pulumi up` installs it, unless the stack file has `kuberay.install: none`"
        )
        return
    check = "KubeRay's definitions"
    served = {each["name"]: each for each in definition["spec"]["versions"] if each.get("served")} if definition else {}
    schema = served.get(VERSION, {}).get("schema", {}).get("openAPIV3Schema", {}).get("properties", {})
    fields = schema.get("spec", {}).get("properties", {})
    missing = [name for name in _RAYJOB_FIELDS if name not in fields]
    if definition is None:
        yield Finding.failed(check, f"there is no kind RayJob. {_INSTALL}")
    elif VERSION not in served:
        yield Finding.failed(check, f"RayJob is not served as {VERSION}, only as {', '.join(served)}. {_INSTALL}")
    elif missing:
        yield Finding.failed(
            check,
            f"RayJob has no {' and no '.join(missing)}: the definitions are older than {_MIN_VERSION}. Helm does not "
            "upgrade them: apply those of the operator's version",
        )
    else:
        yield Finding.ok(check, f"RayJob {VERSION} with {', '.join(_RAYJOB_FIELDS)}")
    check = "KubeRay's operator"
    watching = [each for each in operators.values() if each.watches(jobs_namespace)]
    names = " and ".join(each.name for each in watching or operators.values())
    if not operators:
        yield Finding.failed(check, f"no Deployment has the name or the label kuberay-operator. {_INSTALL}")
    elif not watching:
        yield Finding.failed(
            check, f"{names}: other namespaces only are watched. Add {jobs_namespace} to watchNamespace of its chart"
        )
    elif len(watching) > 1 and any(one.overlaps(other) for one, other in combinations(watching, 2)):
        yield Finding.failed(check, f"{names} watch the same namespaces and undo each other's work: keep one")
    elif len(watching) > 1:
        yield Finding.not_checked(
            check, f"{names} watch different namespaces; --namespace selects the one of your stack"
        )
    for operator in watching:
        version = operator.version or "(unknown version)"
        if problems := list(operator.problems()):
            yield Finding.failed(check, f"{operator.name} {version}: {'; '.join(problems)}")
        else:
            yield Finding.ok(check, f"{operator.name} {version} runs")
