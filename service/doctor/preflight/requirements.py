"""Requirements of a stack on the cluster around it: ingress controller or Gateway, and storage."""

from collections.abc import Iterator, Sequence
from typing import Final

from service.doctor.cluster_api import ClusterApi
from service.doctor.findings import Finding
from service.doctor.preflight.stack_facts import StackFacts
from service.doctor.preflight.temporary_pods import PULL_SECRET, Cluster, TestPod

_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
# Provisioners whose volumes somebody creates in advance.
_STATIC: Final = "kubernetes.io/no-provisioner"
_CLAIM: Final = "doctor-claim"
_BIND_LIMIT_S: Final = 180.0


def check_ingress(api: ClusterApi, facts: StackFacts) -> Iterator[Finding]:
    """Check the ingress class of the stack, and that a policy can select the controller's pods."""
    if not facts.ingress_class:
        return
    problems = []
    classes = [each["metadata"]["name"] for each in api.items("/apis/networking.k8s.io/v1/ingressclasses")]
    if facts.ingress_class not in classes:
        present = f"The cluster has: {', '.join(classes)}" if classes else "The cluster has none: install a controller"
        problems.append(f"there is no IngressClass {facts.ingress_class} (`api.ingress.class_name`). {present}")
    problems += _controller_problems(api, facts, "api.ingress")
    yield from _findings("ingress", problems, f"IngressClass {facts.ingress_class}", facts)


def check_gateway(api: ClusterApi, facts: StackFacts) -> Iterator[Finding]:
    """Check the Gateway of the stack and its listener, and that a policy can select the pods of its data plane."""
    if not facts.gateway:
        return
    problems = []
    namespace, _, name = facts.gateway.partition("/")
    found = api.find(f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/gateways/{name}")
    protocols = {each["name"]: each["protocol"] for each in found["spec"]["listeners"]} if found else {}
    listener = facts.gateway_listener
    if found is None:
        problems.append(f"there is no Gateway {facts.gateway} (`api.gateway.gateway`): create it, or name another one")
    elif listener not in protocols:
        problems.append(
            f"Gateway {facts.gateway} has no listener {listener} (`api.gateway.section_name`). "
            f"It has: {', '.join(protocols)}"
        )
    elif protocols[listener] != "HTTPS":
        problems.append(
            f"the listener {listener} of Gateway {facts.gateway} is {protocols[listener]}, without TLS: name one of "
            "protocol HTTPS in `api.gateway.section_name`"
        )
    problems += _controller_problems(api, facts, "api.gateway")
    yield from _findings("gateway", problems, f"Gateway {facts.gateway}, listener {listener}", facts)


def _controller_problems(api: ClusterApi, facts: StackFacts, section: str) -> Iterator[str]:
    """Yield why the network policies would refuse the requests that a controller forwards."""
    if not facts.controller_namespace:
        return
    pods = [
        pod
        for pod in api.items(f"/api/v1/namespaces/{facts.controller_namespace}/pods")
        if pod.get("status", {}).get("phase") == "Running"
    ]
    where = f"{facts.controller_namespace} (`{section}.controller_namespace`)"
    if not pods:
        yield f"no pod runs in {where}: enter the namespace of the controller's pods, or start them"
    elif all(pod["spec"].get("hostNetwork") for pod in pods):
        yield (
            f"the pods in {where} use the network of their nodes, which no `namespaceSelector` selects, so the "
            f"policies refuse their requests: enter the addresses of the nodes in `{section}.controller_networks`, or "
            "run the controller without `hostNetwork`"
        )


def _findings(check: str, problems: Sequence[str], right: str, facts: StackFacts) -> Iterator[Finding]:
    """Yield a failure for each problem; without any, that everything is right."""
    yield from (Finding.failed(check, problem) for problem in problems)
    if not problems:
        pods = f", with running pods in {facts.controller_namespace}" if facts.controller_namespace else ""
        yield Finding.ok(check, f"{right}{pods}")


def check_storage_binds(cluster: Cluster, facts: StackFacts, namespace: str) -> Iterator[Finding]:
    """Bind a volume claim of 1 GiB of each storage class of the stack, with a pod that mounts it.

    Args:
        cluster: the cluster.
        facts: values of the stack file.
        namespace: a temporary namespace.
    """
    classes = {each["metadata"]["name"]: each for each in cluster.api.items("/apis/storage.k8s.io/v1/storageclasses")}
    defaults = [
        name
        for name, each in classes.items()
        if (each["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    ]
    wanted: dict[str, str] = {}
    for key, named in facts.storage_classes.items():
        wanted.setdefault(named or next(iter(defaults), ""), key)
    for number, (name, key) in enumerate(wanted.items(), start=1):
        check = "volumes of the stack"
        if name not in classes:
            missing = f"there is no storage class {name}" if name else "no storage class is the default"
            present = ", ".join(classes) or "none"
            yield Finding.failed(check, f"{missing}. The cluster has: {present}. Name one in `{key}`")
            continue
        provisioner = classes[name].get("provisioner")
        if provisioner == _STATIC or classes[name].get("reclaimPolicy") == "Retain":
            yield Finding.not_checked(
                check, f"{name}, by {provisioner}, keeps its volumes: a claim of the doctor would use one up"
            )
            continue
        claim, pod = f"{_CLAIM}-{number}", f"storage-{number}"
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": name,
            "resources": {"requests": {"storage": "1Gi"}},
        }
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
        metadata = {"name": claim}
        cluster.api.create(
            path, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
        )
        secret = (PULL_SECRET,) if facts.registry else ()
        cluster.start(namespace, TestPod(name=pod, image=facts.service_image, claim=claim, pull_secrets=secret))
        cluster.wait_until_running(namespace, pod, limit_s=_BIND_LIMIT_S)
        modes = ", ".join(cluster.api.read(f"{path}/{claim}")["status"].get("accessModes", []))
        yield Finding.ok(check, f"{name}, by {provisioner}: a claim of 1 GiB was bound ({modes}) and mounted")
