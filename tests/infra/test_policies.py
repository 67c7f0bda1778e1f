"""Each policy catches a bad resource and accepts the good one that the bad one was made from."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from infra.kubernetes.pod_spec import container_security_context, pod_security_context, resources
from infra.policy import CATALOGUE, violations
from infra.rendering.manifests import Manifest

LABELS = {
    "app.kubernetes.io/name": "cloister",
    "app.kubernetes.io/instance": "acme-dev",
    "app.kubernetes.io/component": "api",
    "app.kubernetes.io/part-of": "cloister",
    "app.kubernetes.io/managed-by": "pulumi",
    "cloister.dev/customer": "acme",
    "cloister.dev/environment": "dev",
}
IMAGE = "registry.example/service@sha256:" + "0" * 64
ADMISSION = "pod-security.kubernetes.io/enforce"
PRIVATE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}


def metadata(name: str = "api") -> dict[str, Any]:
    return {"name": name, "namespace": "acme", "labels": dict(LABELS)}


def pod() -> dict[str, Any]:
    probe = {"httpGet": {"path": "/healthz", "port": 8000}}
    container = {
        "name": "api",
        "image": IMAGE,
        "ports": [{"containerPort": 8000}],
        "env": [{"name": "PGPASSFILE", "value": "/run/pgpass"}],
        "resources": resources(cpu="1", memory="1Gi"),
        "securityContext": container_security_context(),
        "readinessProbe": probe,
        "livenessProbe": probe,
    }
    return {
        "automountServiceAccountToken": False,
        "securityContext": pod_security_context(),
        "containers": [container],
        "volumes": [{"name": "data", "emptyDir": {}}],
    }


def deployment() -> dict[str, Any]:
    template = {"metadata": {"labels": dict(LABELS)}, "spec": pod()}
    spec = {"replicas": 2, "selector": {"matchLabels": LABELS}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(), "spec": spec}


def good_stack() -> dict[str, Manifest]:
    """Return one good resource of each kind that a policy checks."""
    bodies: dict[str, Any] = {
        "deployment": deployment(),
        "budget": {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/component": "api"}}},
        },
        "namespace": {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "acme", "labels": {**LABELS, ADMISSION: "restricted"}},
        },
        "policy": {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata("default-deny"),
            "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
        },
        "role": {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata("reconciler"),
            "rules": [
                {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get"]},
                {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["create"]},
            ],
        },
        "admission": {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": metadata("job-networks"),
            "spec": {},
        },
        "admission binding": {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": metadata("job-networks"),
            "spec": {
                "policyName": "job-networks",
                "validationActions": ["Deny"],
                "matchResources": {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "acme"}},
                },
            },
        },
        "binding": {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata("reconciler"),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reconciler"},
            "subjects": [{"kind": "ServiceAccount", "namespace": "acme", "name": "reconciler"}],
        },
        "service": {"apiVersion": "v1", "kind": "Service", "metadata": metadata(), "spec": {"ports": [{"port": 80}]}},
        "ingress": {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "Ingress",
            "metadata": metadata(),
            "spec": {"tls": [{"hosts": ["api.example"]}], "rules": [{"host": "api.example"}]},
        },
        "route": {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": metadata(),
            "spec": {"hostnames": ["api.example"], "parentRefs": [{"name": "public", "sectionName": "https"}]},
        },
        "templates": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata("templates"),
            "data": {"model.json": json.dumps(ray_job()), "note": "no JSON"},
        },
        "chart": {
            "apiVersion": "helm.sh",
            "kind": "Release",
            "metadata": {"name": "kuberay", "namespace": "kuberay"},
            "spec": {
                "chart": "oci://registry.example/charts/kuberay-operator",
                "values": {
                    "image": {"repository": "registry.example/operator", "tag": "v1@sha256:" + "0" * 64},
                    "watchNamespace": ["cloister-acme-dev-jobs"],
                    "singleNamespaceInstall": True,
                    "rbacEnable": True,
                    "crNamespacedRbacEnable": True,
                },
            },
        },
    }
    good = {name: Manifest(body=body) for name, body in bodies.items()}
    good["cilium policy"] = Manifest(
        body={
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNetworkPolicy",
            "metadata": metadata(),
            "spec": {
                "endpointSelector": {"matchLabels": {"a": "b"}},
                "egress": [{"toFQDNs": [{"matchName": "hooks.example"}], "toPorts": [{"ports": [{"port": "443"}]}]}],
            },
        }
    )
    allowed = {"action": "Allow", "destination": {"services": {"name": "kubernetes", "namespace": "default"}}}
    good["calico policy"] = Manifest(
        body={
            "apiVersion": "projectcalico.org/v3",
            "kind": "NetworkPolicy",
            "metadata": metadata(),
            "spec": {"selector": "a == 'b'", "types": ["Egress"], "egress": [allowed]},
        }
    )
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata("keys"), "stringData": {"key": "s3cret"}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata("data"), "spec": {}}
    good["secret"] = Manifest(body=secret, secrets=frozenset({("stringData",)}))
    good["claim"] = Manifest(body=claim, protected=True, kept=True)
    return good


def ray_job() -> dict[str, Any]:
    template = {"metadata": {"labels": dict(LABELS)}, "spec": pod()}
    template["spec"]["containers"][0]["env"].append(VOID)
    template["spec"]["containers"][0]["env"] += [{"name": name, "value": value} for name, value in PRIVATE.items()]
    cluster = {"authOptions": {"mode": "token"}, "headGroupSpec": {"template": template}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"labels": dict(LABELS)},
        "spec": {"entrypoint": "python -m ray_job", "rayClusterSpec": cluster},
    }


Change = Callable[[dict[str, Any]], object]


def broken(name: str, change: Change) -> set[str]:
    """Return the policies that the stack breaks after one of its resources is changed."""
    stack = good_stack()
    body = copy.deepcopy(stack[name].body)
    change(body)
    changed = Manifest(body=body, secrets=stack[name].secrets, protected=stack[name].protected, kept=stack[name].kept)
    return {violation.policy.name for violation in violations([*(stack | {name: changed}).values()])}


def spec_of(body: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = body["spec"]["template"]["spec"]
    return spec


def container_of(body: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = spec_of(body)["containers"][0]
    return container


def context_of(body: dict[str, Any]) -> dict[str, Any]:
    context: dict[str, Any] = container_of(body)["securityContext"]
    return context


def in_template(change: Change) -> Change:
    """Apply a change to the pod of the RayJob inside the ConfigMap."""

    def changed(body: dict[str, Any]) -> None:
        job = json.loads(body["data"]["model.json"])
        change({"spec": job["spec"]["rayClusterSpec"]["headGroupSpec"]})
        body["data"]["model.json"] = json.dumps(job)

    return changed


def set_in(find: Callable[[dict[str, Any]], dict[str, Any]], **values: Any) -> Change:
    return lambda body: find(body).update(values)


def variable(**changes: Any) -> Change:
    return lambda body: container_of(body)["env"].append(changes)


def mounted(volume: dict[str, Any]) -> Change:
    """Add a volume to a pod and mount it in its container."""

    def change(body: dict[str, Any]) -> None:
        spec_of(body)["volumes"].append({"name": "added", **volume})
        container_of(body).setdefault("volumeMounts", []).append({"name": "added", "mountPath": "/added"})

    return change


def egress_rule(**changes: Any) -> Change:
    return lambda body: body["spec"]["egress"][0].update(changes)


def projected(source: dict[str, Any]) -> dict[str, Any]:
    return {"projected": {"sources": [source]}}


BAD: list[tuple[str, str, Change]] = [
    ("images_by_digest", "deployment", set_in(container_of, image="registry.example/service:1.2")),
    ("images_by_digest", "deployment", set_in(container_of, image="service@sha256:" + "0" * 64)),
    ("images_by_digest", "deployment", set_in(spec_of, initContainers=[{"name": "init", "image": "a:latest"}])),
    ("images_by_digest", "templates", in_template(set_in(container_of, image="registry.example/ray:2.60.0"))),
    ("images_by_digest", "chart", lambda body: body["spec"]["values"]["image"].update(tag="v1")),
    ("no_capabilities", "deployment", lambda body: container_of(body).pop("securityContext")),
    ("no_root", "deployment", set_in(context_of, runAsUser=0)),
    ("unprivileged", "deployment", set_in(context_of, privileged=True)),
    ("no_new_privileges", "deployment", set_in(context_of, allowPrivilegeEscalation=True)),
    ("no_capabilities", "deployment", set_in(context_of, capabilities={"drop": ["ALL"], "add": ["X"]})),
    ("seccomp", "deployment", set_in(context_of, seccompProfile={"type": "Unconfined"})),
    ("no_root", "templates", in_template(set_in(context_of, runAsNonRoot=False))),
    ("read_only_root_file_system", "deployment", set_in(context_of, readOnlyRootFilesystem=False)),
    ("read_only_root_file_system", "templates", in_template(lambda body: context_of(body).clear())),
    ("requests_and_limits", "deployment", set_in(container_of, resources={"requests": {"cpu": "1", "memory": "1Gi"}})),
    ("requests_and_limits", "deployment", lambda body: container_of(body)["resources"]["limits"].pop("memory")),
    ("requests_and_limits", "templates", in_template(lambda body: container_of(body).pop("resources"))),
    ("nothing_of_the_host", "deployment", set_in(spec_of, hostNetwork=True)),
    ("nothing_of_the_host", "deployment", set_in(spec_of, volumes=[{"name": "a", "hostPath": {"path": "/"}}])),
    ("nothing_of_the_host", "deployment", set_in(container_of, ports=[{"containerPort": 1, "hostPort": 1}])),
    ("no_secret_in_an_environment", "deployment", variable(name="DATABASE_PASSWORD", value="s3cret")),
    ("no_secret_in_an_environment", "deployment", variable(name="A", valueFrom={"secretKeyRef": {"name": "a"}})),
    ("no_secret_in_an_environment", "deployment", set_in(container_of, envFrom=[{"secretRef": {"name": "a"}}])),
    ("no_credentials_in_ray_pods", "templates", in_template(mounted({"secret": {"secretName": "database"}}))),
    ("no_credentials_in_ray_pods", "templates", in_template(mounted({"secret": {"secretName": "http-engine"}}))),
    ("no_credentials_in_ray_pods", "templates", in_template(mounted(projected({"serviceAccountToken": {}})))),
    ("no_credentials_in_ray_pods", "templates", in_template(mounted(projected({"secret": {"name": "database"}})))),
    ("gpus_on_request_only", "templates", in_template(lambda body: container_of(body)["env"].remove(VOID))),
    ("gpus_on_request_only", "templates", in_template(variable(name=VOID["name"], value="all"))),
    (
        "gpus_on_request_only",
        "templates",
        in_template(lambda body: container_of(body)["resources"]["limits"].update({"nvidia.com/mig-1g.10gb": "1"})),
    ),
    ("probes_on_servers", "deployment", lambda body: container_of(body).pop("readinessProbe")),
    ("probes_on_servers", "deployment", lambda body: container_of(body).pop("livenessProbe")),
    ("operator_in_named_namespaces", "chart", lambda body: body["spec"]["values"].pop("watchNamespace")),
    ("operator_in_named_namespaces", "chart", lambda body: body["spec"]["values"].pop("singleNamespaceInstall")),
    ("operator_in_named_namespaces", "chart", set_in(lambda body: body["spec"]["values"], rbacEnable=False)),
    (
        "operator_in_named_namespaces",
        "chart",
        set_in(lambda body: body["spec"]["values"], crNamespacedRbacEnable=False),
    ),
    ("owner_labels", "deployment", lambda body: body["metadata"]["labels"].pop("cloister.dev/customer")),
    ("owner_labels", "deployment", lambda body: body["spec"]["template"].pop("metadata")),
    ("owner_labels", "secret", lambda body: body["metadata"].pop("labels")),
    ("owner_labels", "templates", in_template(lambda body: body["spec"]["template"].pop("metadata"))),
    ("explicit_names", "service", lambda body: body["metadata"].pop("name")),
    ("explicit_names", "service", lambda body: body["metadata"].pop("namespace")),
    ("explicit_names", "service", lambda body: body["metadata"].update(namespace="default")),
    ("no_wildcard_rights", "role", lambda body: body["rules"][0].update(verbs=["*"])),
    ("no_wildcard_rights", "role", lambda body: body["rules"][0].update(resources=["rayjobs/*"])),
    ("no_wildcard_rights", "role", lambda body: body["rules"][0].update(apiGroups=["*"])),
    ("no_escalation", "role", lambda body: body["rules"][0].update(verbs=["escalate"])),
    ("no_reading_of_secrets", "role", lambda body: body["rules"][0].update(resources=["secrets"])),
    ("no_administrators", "binding", lambda body: body["roleRef"].update(kind="ClusterRole", name="cluster-admin")),
    ("secrets_encrypted_in_state", "secret", lambda body: body.update(data={"other": "czNjcmV0"})),
    ("services_stay_inside", "service", lambda body: body["spec"].update(type="NodePort")),
    ("services_stay_inside", "service", lambda body: body["spec"].update(type="LoadBalancer")),
    ("ingress_tls", "ingress", lambda body: body["spec"].pop("tls")),
    ("ingress_tls", "route", lambda body: body["spec"].pop("hostnames")),
    ("ingress_tls", "route", lambda body: body["spec"]["parentRefs"][0].pop("sectionName")),
    ("only_the_api_is_exposed", "route", lambda body: body["spec"].update(rules=[{"backendRefs": [{"name": "api"}]}])),
    ("no_open_flows", "policy", lambda body: body["spec"].update(egress=[{}])),
    ("no_open_flows", "policy", lambda body: body["spec"].update(ingress=[{"ports": [{"port": 80}]}])),
    ("no_open_flows", "policy", lambda body: body["spec"].update(ingress=[{"from": [{"namespaceSelector": {}}]}])),
    ("no_open_flows", "policy", lambda body: body["spec"].update(egress=[{"to": [{"ipBlock": {"cidr": "::/0"}}]}])),
    ("no_open_flows", "cilium policy", egress_rule(toFQDNs=[])),
    ("no_open_flows", "cilium policy", egress_rule(toFQDNs=[{"matchPattern": "*"}])),
    ("no_open_flows", "cilium policy", egress_rule(toPorts=[])),
    ("no_open_flows", "cilium policy", egress_rule(toEntities=["world"])),
    ("no_open_flows", "cilium policy", egress_rule(toEndpoints=[{}])),
    ("no_open_flows", "cilium policy", egress_rule(toCIDR=["0.0.0.0/0"])),
    ("no_open_flows", "cilium policy", lambda body: body["spec"].update(ingress=[{"fromEntities": ["cluster"]}])),
    ("no_open_flows", "cilium policy", lambda body: body.update(kind="CiliumClusterwideNetworkPolicy")),
    ("no_open_flows", "calico policy", egress_rule(destination={})),
    ("no_open_flows", "calico policy", lambda body: body["spec"].update(ingress=[{"action": "Allow"}])),
    ("default_deny", "policy", lambda body: body.update(apiVersion="projectcalico.org/v3")),
    ("default_deny", "policy", lambda body: body["spec"].update(policyTypes=["Ingress"])),
    ("default_deny", "policy", lambda body: body["spec"].update(egress=[{}])),
    ("default_deny", "policy", lambda body: body["spec"].update(podSelector={"matchLabels": {"a": "b"}})),
    ("default_deny", "namespace", lambda body: body["metadata"].update(name="another")),
    ("tokens_only_with_rights", "deployment", lambda body: spec_of(body).pop("automountServiceAccountToken")),
    ("tokens_only_with_rights", "templates", in_template(set_in(spec_of, automountServiceAccountToken=True))),
    ("limited_network_policies", "role", lambda body: body["metadata"].update(namespace="another")),
    ("limited_network_policies", "role", lambda body: body["rules"][1]["resources"].append("ciliumnetworkpolicies")),
    ("limited_network_policies", "admission", lambda body: body["metadata"].update(name="another")),
    ("admission_policies_deny", "admission binding", lambda body: body["spec"].update(validationActions=["Audit"])),
    ("disruption_budgets", "budget", lambda body: body["metadata"].update(namespace="another")),
    ("disruption_budgets", "budget", lambda body: body["spec"].update(maxUnavailable=0)),
    ("unique_objects", "service", lambda body: body.update(good_stack()["secret"].body)),
]


def test_good_stack_has_no_violations() -> None:
    assert [str(violation) for violation in violations([*good_stack().values()])] == []


@pytest.mark.parametrize(("policy", "resource", "change"), BAD, ids=[f"{p}-{r}" for p, r, _ in BAD])
def test_policy_catches_a_bad_resource(policy: str, resource: str, change: Change) -> None:
    assert policy in broken(resource, change)


def test_policies_have_unique_ids_and_complete_texts() -> None:
    assert len({policy.id for policy in CATALOGUE}) == len({policy.name for policy in CATALOGUE}) == len(CATALOGUE)
    for policy in CATALOGUE:
        assert policy.title.endswith("."), policy.id
        assert policy.remedy.endswith("."), policy.id
        assert policy.references, policy.id
        assert policy.proof, policy.id


def test_head_may_mount_the_token_of_its_job() -> None:
    assert broken("templates", in_template(mounted({"secret": {"secretName": "set-by-the-launcher"}}))) == set()


@pytest.mark.parametrize("option", ["protected", "kept"])
def test_data_that_pulumi_would_delete_is_a_violation(option: str) -> None:
    claim = good_stack()["claim"].body
    options = {"protected": True, "kept": True} | {option: False}

    found = violations([Manifest(body=claim, protected=options["protected"], kept=options["kept"])])

    assert [violation.policy.name for violation in found] == ["data_is_kept"]


def test_secret_value_outside_a_secret_is_a_violation_except_digests() -> None:
    body = deployment()
    body["spec"]["template"]["metadata"]["annotations"] = {"cloister.dev/keys": "1"}
    path = ("spec", "template", "metadata", "annotations", "cloister.dev/keys")
    good, bad = Manifest(body=body, secrets=frozenset({path})), Manifest(body=body, secrets=frozenset({("spec",)}))

    def caught(manifest: Manifest) -> bool:
        return any(violation.policy.name == "secrets_only_in_secrets" for violation in violations([manifest]))

    assert not caught(good)
    assert caught(bad)


def test_pod_may_have_a_token_if_its_account_is_bound_to_a_role() -> None:
    def change(body: dict[str, Any]) -> None:
        spec_of(body).update(automountServiceAccountToken=True, serviceAccountName="reconciler")

    assert broken("deployment", change) == set()


@pytest.mark.parametrize(("component", "allowed"), [("device-plugin", True), ("api", False)])
def test_only_the_device_plugin_may_use_the_device_directory(component: str, *, allowed: bool) -> None:
    body = deployment() | {"kind": "DaemonSet"}
    body["metadata"]["labels"]["app.kubernetes.io/component"] = component
    spec_of(body)["volumes"] = [{"name": "plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}]

    found = {violation.policy.name for violation in violations([Manifest(body=body)])}

    assert ("nothing_of_the_host" not in found) is allowed
