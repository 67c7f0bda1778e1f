"""Changes of security-relevant settings of every example stack, and what catches each.

    python -m tests.infra.mutations

A change of a resource must turn its policy red. A change of a stack file must be refused, by its validation or by a
policy, or turn an advisory policy red. Nothing survives.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import yaml
from pulumi import RunError

from infra.policy import assess, refusals
from infra.policy.facts import FACTS_TYPE, PolicyException, facts_of
from infra.rendering.recording import RecordedResource, Recording
from tests.infra.previewed_stacks import STACKS, preview, preview_values, stack_text

TODAY = date(2030, 1, 1)
Change = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A change of one resource that breaks one policy.

    Attributes:
        policy: name of the policy.
        resource: kind and name of the resource, or the kind alone for the first one.
        change: the change of its inputs.
        options: Pulumi's options to replace.
    """

    policy: str
    resource: str
    change: Change = lambda _body: None
    options: Mapping[str, Any] | None = None


def _pod(body: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = body["spec"]["template"]["spec"]
    return spec


def _container(body: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = _pod(body)["containers"][0]
    return container


def _context(**values: Any) -> Change:
    return lambda body: _container(body)["securityContext"].update(values)


def _in_spec(**values: Any) -> Change:
    return lambda body: body["spec"].update(values)


def _variable(name: str, value: str | None) -> Change:
    def change(body: dict[str, Any]) -> None:
        env = [each for each in _container(body)["env"] if each["name"] != name]
        _container(body)["env"] = env if value is None else [*env, {"name": name, "value": value}]

    return change


def _replaced(name: str, old: str, new: str) -> Change:
    def change(body: dict[str, Any]) -> None:
        for each in _container(body)["env"]:
            if each["name"] == name:
                each["value"] = each["value"].replace(old, new)

    return change


def _job(change: Change) -> Change:
    """Apply a change to the spec of the first job template."""

    def changed(body: dict[str, Any]) -> None:
        name = next(iter(body["data"]))
        job = json.loads(body["data"][name])
        change(job["spec"])
        body["data"][name] = json.dumps(job)

    return changed


def _head(change: Change) -> Change:
    return _job(lambda spec: change(spec["rayClusterSpec"]["headGroupSpec"]))


def _model(**values: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        content = yaml.safe_load(body["data"]["models.yaml"])
        model = content["models"][0]
        arguments = model.get("engine_args", {}) | values.get("engine_args", {})
        model.update(values, engine_args=arguments)
        body["data"]["models.yaml"] = yaml.safe_dump(content)

    return change


_TEMPLATES = "ConfigMap ray-job-templates"
_SECRET_VOLUME = {"name": "added", "secret": {"secretName": "database-credentials"}}
_RULE = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}


def _mount_credentials(group: dict[str, Any]) -> None:
    _pod({"spec": group})["volumes"].append(_SECRET_VOLUME)
    _container({"spec": group})["volumeMounts"].append({"name": "added", "mountPath": "/added"})


MUTATIONS = (
    Mutation(policy="default_deny", resource="NetworkPolicy default-deny", change=_in_spec(policyTypes=["Ingress"])),
    Mutation(policy="default_deny", resource="NetworkPolicy default-deny", change=_in_spec(podSelector={"a": "b"})),
    Mutation(policy="no_open_flows", resource="NetworkPolicy api", change=_in_spec(ingress=[{}])),
    Mutation(policy="no_open_flows", resource="NetworkPolicy kuberay", change=_in_spec(egress=[{}])),
    Mutation(policy="services_stay_inside", resource="Service api", change=_in_spec(type="LoadBalancer")),
    Mutation(policy="services_stay_inside", resource="Service coordinator", change=_in_spec(type="NodePort")),
    Mutation(
        policy="limited_network_policies",
        resource="ValidatingAdmissionPolicyBinding",
        change=_in_spec(matchResources={}),
    ),
    Mutation(
        policy="admission_policies_deny",
        resource="ValidatingAdmissionPolicyBinding",
        change=_in_spec(validationActions=["Warn"]),
    ),
    Mutation(
        policy="only_the_api_is_exposed",
        resource="Ingress api",
        change=lambda body: body["spec"]["rules"][0]["http"]["paths"][0].update(path="/"),
    ),
    Mutation(policy="ingress_tls", resource="Ingress api", change=lambda body: body["spec"].pop("tls")),
    Mutation(
        policy="database_tls",
        resource="Deployment api",
        change=_replaced("CLOISTER_DATABASE_URL", "verify-full", "prefer"),
    ),
    Mutation(
        policy="object_store_tls", resource="Deployment api", change=_replaced("CLOISTER_OBJECT_STORE", "https", "http")
    ),
    Mutation(
        policy="tracing_tls",
        resource="Deployment api",
        change=_variable("CLOISTER_OTLP_ENDPOINT", "http://collector.example:4318"),
    ),
    Mutation(
        policy="chart_tls",
        resource="Chart kuberay-operator",
        change=lambda body: body.update(chart="kuberay-operator", repositoryOpts={"repo": "http://charts.example"}),
    ),
    Mutation(
        policy="endpoint_tls", resource="ConfigMap models", change=_model(engine="http", base_url="http://10.0.0.1/v1")
    ),
    Mutation(policy="unprivileged", resource="Deployment api", change=_context(privileged=True)),
    Mutation(policy="no_new_privileges", resource="Deployment api", change=_context(allowPrivilegeEscalation=True)),
    Mutation(policy="no_root", resource="Deployment api", change=_context(runAsUser=0)),
    Mutation(policy="no_capabilities", resource="Deployment api", change=_context(capabilities={"drop": []})),
    Mutation(policy="seccomp", resource="Deployment api", change=_context(seccompProfile={"type": "Unconfined"})),
    Mutation(
        policy="read_only_root_file_system", resource="Deployment api", change=_context(readOnlyRootFilesystem=False)
    ),
    Mutation(
        policy="nothing_of_the_host", resource="Deployment api", change=lambda body: _pod(body).update(hostPID=True)
    ),
    Mutation(
        policy="nothing_of_the_host",
        resource="Deployment coordinator",
        change=lambda body: _pod(body)["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
    ),
    Mutation(
        policy="requests_and_limits",
        resource="Deployment api",
        change=lambda body: _container(body)["resources"].pop("limits"),
    ),
    Mutation(
        policy="restricted_namespaces",
        resource="Namespace",
        change=lambda body: body["metadata"]["labels"].update({"pod-security.kubernetes.io/enforce": "baseline"}),
    ),
    Mutation(
        policy="gpus_on_request_only",
        resource=_TEMPLATES,
        change=_head(lambda group: _variable("NVIDIA_VISIBLE_DEVICES", "all")({"spec": group})),
    ),
    Mutation(policy="core_dumps_off", resource=_TEMPLATES, change=_job(lambda spec: spec.update(entrypoint="sh"))),
    Mutation(
        policy="probes_on_servers", resource="Deployment api", change=lambda body: _container(body).pop("livenessProbe")
    ),
    Mutation(policy="disruption_budgets", resource="PodDisruptionBudget api", change=_in_spec(maxUnavailable=0)),
    Mutation(
        policy="images_by_digest",
        resource="Deployment api",
        change=lambda body: _container(body).update(image=_container(body)["image"].partition("@")[0] + ":latest"),
    ),
    Mutation(
        policy="approved_registries",
        resource="StackFacts facts",
        change=lambda body: body.update(registries=["registry.other.example"]),
    ),
    Mutation(
        policy="registries_are_approved", resource="StackFacts facts", change=lambda body: body.update(registries=[])
    ),
    Mutation(
        policy="images_are_pulled",
        resource="Deployment api",
        change=lambda body: _container(body).update(imagePullPolicy="Never"),
    ),
    Mutation(
        policy="no_wildcard_rights",
        resource="Role launcher",
        change=lambda body: body["rules"][0].update(apiGroups=["*"]),
    ),
    Mutation(
        policy="no_administrators",
        resource="RoleBinding launcher",
        change=lambda body: body["roleRef"].update(kind="ClusterRole", name="cluster-admin"),
    ),
    Mutation(
        policy="no_escalation",
        resource="Role launcher",
        change=lambda body: body["rules"][0]["verbs"].append("escalate"),
    ),
    Mutation(
        policy="no_reading_of_secrets", resource="Role launcher", change=lambda body: body["rules"].append(dict(_RULE))
    ),
    Mutation(
        policy="tokens_only_with_rights",
        resource="Deployment api",
        change=lambda body: _pod(body).update(automountServiceAccountToken=True),
    ),
    Mutation(
        policy="own_service_accounts",
        resource="Deployment coordinator",
        change=lambda body: _pod(body).update(automountServiceAccountToken=True, serviceAccountName="reconciler"),
    ),
    Mutation(
        policy="operator_in_named_namespaces",
        resource="Chart kuberay-operator",
        change=lambda body: body["values"].update(singleNamespaceInstall=False),
    ),
    Mutation(
        policy="secrets_only_in_secrets", resource="ConfigMap models", options={"secrets": frozenset({("data",)})}
    ),
    Mutation(policy="secrets_encrypted_in_state", resource="Secret receipt-key", options={"secrets": frozenset()}),
    Mutation(
        policy="no_secret_in_an_environment",
        resource="Deployment api",
        change=_variable("DATABASE_PASSWORD", "s3cret"),
    ),
    Mutation(policy="no_credentials_in_ray_pods", resource=_TEMPLATES, change=_head(_mount_credentials)),
    Mutation(
        policy="short_lived_tokens",
        resource=_TEMPLATES,
        change=lambda body: body.update(
            data={
                name: text.replace('"expirationSeconds": 3600', '"expirationSeconds": 86400').replace(
                    '"expirationSeconds":3600', '"expirationSeconds":86400'
                )
                for name, text in body["data"].items()
            }
        ),
    ),
    Mutation(
        policy="stored_secrets_encrypted",
        resource="Deployment reconciler",
        change=_variable("CLOISTER_RECEIPT_KEY_FILE", None),
    ),
    Mutation(
        policy="secrets_encrypted_at_rest",
        resource="StackFacts facts",
        change=lambda body: body.update(secrets_encrypted_at_rest=False, makes_the_cluster=False),
    ),
    Mutation(
        policy="ray_token",
        resource=_TEMPLATES,
        change=_job(lambda spec: spec["rayClusterSpec"]["authOptions"].update(mode="disabled")),
    ),
    Mutation(
        policy="ray_stays_inside", resource=_TEMPLATES, change=_head(lambda group: group.update(serviceType="NodePort"))
    ),
    Mutation(
        policy="telemetry_off",
        resource=_TEMPLATES,
        change=_head(lambda group: _variable("RAY_USAGE_STATS_ENABLED", "1")({"spec": group})),
    ),
    Mutation(
        policy="no_downloads",
        resource=_TEMPLATES,
        change=_head(lambda group: _variable("HF_HUB_OFFLINE", "0")({"spec": group})),
    ),
    Mutation(policy="models_are_pinned", resource="ConfigMap models", change=_model(source="acme/model")),
    Mutation(
        policy="unsafe_arguments_are_acknowledged",
        resource="ConfigMap models",
        change=_model(engine_args={"trust_remote_code": True}),
    ),
    Mutation(
        policy="no_unsafe_arguments",
        resource="ConfigMap models",
        change=_model(engine_args={"trust_remote_code": True}, unsafe_engine_args=["trust_remote_code"]),
    ),
    Mutation(policy="data_is_kept", resource="Cluster database", options={"protect": False}),
    Mutation(policy="data_is_kept", resource="PersistentVolumeClaim", options={"retain_on_delete": False}),
    Mutation(policy="several_copies", resource="Cluster database", change=_in_spec(instances=1)),
    Mutation(
        policy="database_backups",
        resource="Cluster database",
        change=lambda body: body["spec"].pop("plugins", None),
    ),
    Mutation(
        policy="separate_database_roles",
        resource="Deployment api",
        change=_replaced("CLOISTER_DATABASE_URL", "_service@", "@"),
    ),
    Mutation(
        policy="limited_retention",
        resource="Deployment reconciler",
        change=_variable("CLOISTER_RETENTION_DAYS", "3650"),
    ),
    Mutation(policy="audit_export", resource="CronJob audit-export", change=_in_spec(suspend=True)),
    Mutation(policy="keys_expire", resource="Deployment api", change=_variable("CLOISTER_MAX_KEY_DAYS", "36500")),
    Mutation(policy="owner_labels", resource="Service api", change=lambda body: body["metadata"].pop("labels")),
    Mutation(policy="explicit_names", resource="Service api", change=lambda body: body["metadata"].update(name="")),
    Mutation(
        policy="quotas",
        resource="ResourceQuota",
        change=lambda body: body["spec"]["hard"].update({"services.nodeports": "5"}),
    ),
    Mutation(
        policy="own_prefix",
        resource="Deployment api",
        change=lambda body: _replaced("CLOISTER_OBJECT_STORE", _prefix(body), "")(body),
    ),
    Mutation(policy="own_nodes", resource="StackFacts facts", change=lambda body: body.update(isolation="nodes")),
    Mutation(
        policy="own_namespaces",
        resource="ServiceAccount api",
        change=lambda body: body["metadata"].update(namespace="cloister-other-prod"),
    ),
    Mutation(
        policy="unique_objects",
        resource="ServiceAccount api",
        change=lambda body: body["metadata"].update(name="coordinator"),
    ),
    Mutation(
        policy="host_keys",
        resource="Command",
        change=lambda body: body["connection"].update(hostKey=None),
    ),
)


def _prefix(body: dict[str, Any]) -> str:
    url = str(next(each["value"] for each in _container(body)["env"] if each["name"] == "CLOISTER_OBJECT_STORE"))
    return "/" + url.removeprefix("s3://").partition("?")[0].partition("/")[2]


def mutated(recording: Recording, mutation: Mutation) -> Recording | None:
    """Return a recording with a mutation; None if it lacks the resource."""
    kind, _, name = mutation.resource.partition(" ")

    def matches(resource: RecordedResource) -> bool:
        last = resource.type.rpartition(":")[2]
        given = (resource.inputs.get("metadata") or {}).get("name", resource.name)
        is_kind = last == kind and (resource.custom or resource.type == FACTS_TYPE)
        return is_kind and (not name or given == name or given.startswith(f"{name}-"))

    for index, resource in enumerate(recording.resources):
        if matches(resource):
            inputs = copy.deepcopy(resource.inputs)
            mutation.change(inputs)
            changed = replace(resource, inputs=inputs, **(mutation.options or {}))
            resources = (*recording.resources[:index], changed, *recording.resources[index + 1 :])
            return replace(recording, resources=resources)
    return None


def red(recording: Recording) -> set[str]:
    """Return the names of the policies that a recording breaks."""
    return {result.policy.name for result in assess(recording, today=TODAY) if result.violations}


def exceptions(recording: Recording) -> set[PolicyException]:
    """Return the exceptions of a stack, which its report lists."""
    return set(facts_of(recording.resources).exceptions)


def problems(recording: Recording) -> set[str]:
    """Return all problems of a recording, also the accepted ones."""
    return {
        str(violation)
        for result in assess(recording, today=TODAY)
        for violation in (*result.violations, *(each for each, _ in result.accepted))
    }


_WEAKER: Mapping[str, Any] = {
    "images.service": "registry.acme.example/cloister/service:latest",
    "transport.allow_clear_text": [],
    "durability.allow_single_copy": [],
    "retention_days": 3650,
    "network.webhook_networks": ["0.0.0.0/0"],
    "network.kubernetes_api": {"networks": ["0.0.0.0/0"]},
    "api.ingress": {"host": "batch.acme.example", "tls": {}},
    "api.max_key_days": 36500,
    "policy.registries": ["registry.nobody.example"],
    "policy.exceptions": [
        {"policy": "CLO-IMG-001", "resource": "*", "reason": "none", "owner": "nobody", "expires": "2020-01-01"}
    ],
    "kuberay.chart": {"repository": "http://charts.example"},
    "keep_data": False,
    "receipt_key": "in plain text",
    "models.0.engine_args.trust_remote_code": True,
    "models.0.source": "acme/model-without-a-commit",
    "object_store.endpoint_url": "http://s3.acme.example",
    "database.url": "postgresql://a@db.acme.example/a?sslmode=disable",
    "node_pools.cpu": {"cpus": 8, "memory_gib": 28, "environment": {"LD_PRELOAD": "/evil.so"}},
}
"""Weaker values of a stack file by path."""
_ONLY_IF_SET = ("api.max_key_days",)
"""Paths whose values are weaker than another value, but not than none."""


def weaker_files(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield weaker versions of a stack file, each with the changed path."""
    for path, value in _WEAKER.items():
        values = copy.deepcopy(dict(stack_text(name).values))
        *outer, last = path.split(".")
        place: Any = values
        for step in outer:
            place = place.get(step) or {} if isinstance(place, dict) else place[int(step)]
        if place and place.get(last) != value and (last in place or path not in _ONLY_IF_SET):
            place[last] = value
            yield path, values


def caught(name: str, values: dict[str, Any]) -> str:
    """Return what catches a weaker stack file: an error, a policy that turns red, or a problem to accept; or ''."""
    text = stack_text(name)
    encrypted = text.secret_keys - {"receipt_key"} if values.get("receipt_key") == "in plain text" else text.secret_keys
    try:
        recording = preview_values(values, encrypted)
    except RunError as error:
        return f"the stack file: {str(error).splitlines()[-1].strip()[:100]}"
    lines = refusals(recording, today=TODAY)
    if lines:
        return lines[0][:110]
    new = red(recording) - red(preview(name))
    if exceptions(recording) - exceptions(preview(name)):
        new.add("an exception in the report")
    return ", ".join(sorted(new))


def results(name: str) -> Iterator[tuple[str, str]]:
    """Yield each mutation of an example stack, with what catches it; '' for a survivor."""
    recording = preview(name)
    before = problems(recording)
    for mutation in MUTATIONS:
        changed = mutated(recording, mutation)
        # A platform has no pods of a customer, and no account that writes network policies.
        has_none = name == "platform" and mutation.policy in {"own_nodes", "limited_network_policies"}
        if changed is None or changed == recording or has_none:
            continue
        found = sorted(problems(changed) - before)
        yield f"{mutation.resource}: {mutation.policy}", found[0][:110] if found else ""
    for path, values in weaker_files(name):
        yield f"stack file: {path}", caught(name, values)


def main() -> int:
    """Print a table of all mutations and return 1 if one survives."""
    rows = [(name, *row) for name in STACKS for row in results(name)]
    for name, mutation, by in rows:
        sys.stdout.write(f"{name:24} {mutation:64} {by or 'SURVIVES'}\n")
    survivors = sum(not by for _, _, by in rows)
    sys.stdout.write(f"{len(rows)} mutations, {survivors} survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
