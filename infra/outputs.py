"""What a stack tells after `pulumi up`: where it is, and what to run next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infra.naming import StackNames


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOutputs:
    """The outputs of a stack. None is a secret.

    Attributes:
        api_address: the base URL for clients.
        service_namespace: API, reconciler, database and object store.
        jobs_namespace: the Ray clusters of batches.
        first_key: the command that makes an API key and shows it once.
        reach_api: the command that reaches the API from this machine without an ingress.
        doctor: the command that checks cluster and stack from this machine, and inside of the stack's pods.
        dashboards: commands that open Ray's dashboard of a running batch, and metrics.
        next_commands: what to look at first, in this order.
        models: the ids that requests use.
        stays_after_destroy: what `pulumi destroy` leaves in the cluster, and why.
    """

    api_address: str
    service_namespace: str
    jobs_namespace: str
    first_key: str
    reach_api: str
    doctor: str
    dashboards: Mapping[str, str]
    next_commands: Sequence[str]
    models: Sequence[str]
    stays_after_destroy: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """By name, as Pulumi exports them."""
        return asdict(self)


def stack_outputs(
    *,
    names: StackNames,
    context: str,
    api_address: str,
    has_ingress: bool,
    models: Sequence[str],
    stays: Sequence[str],
) -> StackOutputs:
    """The outputs of a stack.

    Args:
        names: the stack.
        context: of the kubeconfig.
        api_address: the base URL for clients.
        has_ingress: whether it can be reached from outside of the cluster.
        models: the ids that requests use.
        stays: what a destroy leaves.
    """
    service = f"kubectl --context {context} --namespace {names.service_namespace}"
    jobs = f"kubectl --context {context} --namespace {names.jobs_namespace}"
    reach_api = f"{service} port-forward svc/api 8000:80"
    base_url, first = (api_address, ()) if has_ingress else ("http://127.0.0.1:8000/v1", (f"{reach_api} &",))
    return StackOutputs(
        api_address=api_address,
        service_namespace=names.service_namespace,
        jobs_namespace=names.jobs_namespace,
        first_key=f"{service} exec deploy/api -- cloister keys create first",
        reach_api=reach_api,
        doctor=f"cloister doctor --context {context} --namespace {names.service_namespace}",
        dashboards={
            "ray": f"{jobs} port-forward $({jobs} get pods --selector ray.io/node-type=head --output name | head -n 1) "
            "8265:8265, then http://127.0.0.1:8265",
            "api_metrics": f"{service} port-forward deploy/api 8000:8000, then http://127.0.0.1:8000/metrics",
            "reconciler_metrics": f"{service} port-forward deploy/reconciler 8001:8001, "
            "then http://127.0.0.1:8001/metrics",
        },
        next_commands=(
            f"{service} get pods",
            f"{service} exec deploy/api -- cloister keys create first",
            *first,
            f"curl {base_url}/models --header 'Authorization: Bearer sk-cloister-…'",
            f"{jobs} get rayjobs --watch",
        ),
        models=tuple(models),
        stays_after_destroy=tuple(stays),
    )
