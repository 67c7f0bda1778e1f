"""Checks of settings of the stack, which its resources show: connections, retention, models, tenants, facts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import yaml

from infra.policy.facts import StackFacts
from infra.policy.pod_checks import environments, images, pods
from infra.policy.stack_checks import StackProblems
from infra.rendering.manifests import Manifest
from service.unsafe_engine_args import unsafe_arg_problems

_DATABASE_URL: Final = "CLOISTER_DATABASE_URL"
_OBJECT_STORE: Final = "CLOISTER_OBJECT_STORE"
_COLLECTOR: Final = "CLOISTER_OTLP_ENDPOINT"
_KEY_FILES: Final = ("CLOISTER_ENCRYPTION_KEYS_FILE", "CLOISTER_RECEIPT_KEY_FILE")
_KEY_HOLDERS: Final = frozenset({"api", "reconciler"})
_MAX_KEY_DAYS: Final = 365
_DEVELOPMENT: Final = "dev"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_COMPONENT: Final = "app.kubernetes.io/component"
_CUSTOMER: Final = "cloister.dev/customer"
_SHARED_COMPONENTS: Final = frozenset({"kuberay", "device-plugin", "customers", "node-pools"})


def database_problems(manifests: Sequence[Manifest]) -> StackProblems:
    """Check TLS to the database, and that the service has another role than the migrations."""
    urls = {
        manifest.labels.get(_COMPONENT, ""): (manifest, variables[_DATABASE_URL])
        for manifest in manifests
        for _, variables in environments(manifest)
        if variables.get(_DATABASE_URL)
    }
    for manifest, url in urls.values():
        if parse_qs(urlsplit(url).query).get("sslmode") != ["verify-full"]:
            yield "database_tls", manifest, f"{_DATABASE_URL} has no sslmode=verify-full"
    owner = {urlsplit(url).username for component, (_, url) in urls.items() if component == "migrations"}
    for component, (manifest, url) in urls.items():
        if component != "migrations" and urlsplit(url).username in owner:
            yield "separate_database_roles", manifest, f"{component} logs in as the owner of the database"


def object_store_problems(manifests: Sequence[Manifest]) -> StackProblems:
    """Check TLS to the object store and the prefix of the stack's objects."""
    for manifest in manifests:
        for title, variables in environments(manifest):
            if not variables.get(_OBJECT_STORE):
                continue
            url = urlsplit(variables[_OBJECT_STORE])
            endpoint = parse_qs(url.query).get("endpoint_url", [""])[0]
            # Without an endpoint, boto3 uses that of AWS, by TLS.
            if url.scheme == "s3" and endpoint and not endpoint.startswith("https://"):
                yield "object_store_tls", manifest, f"{title} uses {endpoint}"
            if not url.path.strip("/"):
                yield "own_prefix", manifest, f"{title} uses the whole bucket {url.netloc}"
        backups = (manifest.body.get("spec") or {}).get("configuration") or {}
        if manifest.kind == "ObjectStore" and not str(backups.get("endpointURL", "https://")).startswith("https://"):
            yield "object_store_tls", manifest, f"backups go to {backups['endpointURL']}"


def tracing_problems(manifests: Sequence[Manifest]) -> StackProblems:
    """Check TLS to the collector of traces."""
    for manifest in manifests:
        for title, variables in environments(manifest):
            if not variables.get(_COLLECTOR, "https://").startswith("https://"):
                yield "tracing_tls", manifest, f"{title} uses {variables[_COLLECTOR]}"


def chart_problems(manifests: Sequence[Manifest]) -> StackProblems:
    """Check the repositories of charts."""
    for manifest in manifests:
        if manifest.body.get("apiVersion") != "helm.sh":
            continue
        spec = manifest.body["spec"]
        repository = str((spec.get("repositoryOpts") or {}).get("repo") or spec.get("chart"))
        if not repository.startswith(("https://", "oci://")):
            yield "chart_tls", manifest, f"the chart comes from {repository}"


def model_problems(manifests: Sequence[Manifest]) -> StackProblems:
    """Check the models in the ConfigMap that the service reads."""
    for manifest in manifests:
        text = (manifest.body.get("data") or {}).get("models.yaml") if manifest.kind == "ConfigMap" else None
        for model in (yaml.safe_load(text) or {}).get("models") or () if text else ():
            title, arguments = f"the model {model.get('id')}", model.get("engine_args") or {}
            acknowledged = tuple(model.get("unsafe_engine_args") or ())
            if model.get("engine") == "http":
                if not str(model.get("base_url", "")).startswith("https://"):
                    yield "endpoint_tls", manifest, f"{title} uses {model.get('base_url')}"
                continue
            source = str(model.get("source") or model.get("id"))
            if not source.startswith("/") and not _COMMIT.fullmatch(str(arguments.get("revision", ""))):
                yield "models_are_pinned", manifest, f"{title} is {source} without a commit"
            for path, problem in unsafe_arg_problems(arguments, acknowledged):
                yield "unsafe_arguments_are_acknowledged", manifest, f"{title}: {'.'.join(path)} {problem}"
            if acknowledged:
                yield "no_unsafe_arguments", manifest, f"{title} has {', '.join(acknowledged)}"


def service_problems(manifests: Sequence[Manifest], facts: StackFacts) -> StackProblems:
    """Check retention, lifetimes and keys of the service, its audit export and its backups."""
    service = [
        (manifest, variables)
        for manifest in manifests
        if manifest.labels.get(_COMPONENT) in _KEY_HOLDERS
        for _, variables in environments(manifest)
        if variables.get(_DATABASE_URL)
    ]
    for manifest, variables in service:
        days = variables.get("CLOISTER_RETENTION_DAYS", "")
        if not days.isdecimal() or int(days) > facts.max_retention_days:
            yield "limited_retention", manifest, f"content is kept {days or '?'} days, not {facts.max_retention_days}"
        for name in _KEY_FILES:
            if not variables.get(name):
                yield "stored_secrets_encrypted", manifest, f"{name} is not set"
        lifetime = variables.get("CLOISTER_MAX_KEY_DAYS", "")
        if manifest.labels[_COMPONENT] == "api" and not (lifetime.isdecimal() and int(lifetime) <= _MAX_KEY_DAYS):
            yield "keys_expire", manifest, f"API keys live for {f'{lifetime} days' if lifetime else 'ever'}"
    exports = [each for each in manifests if each.kind == "CronJob" and each.labels.get(_COMPONENT) == "audit-export"]
    if service and not exports:
        yield "audit_export", service[0][0], "no CronJob exports the audit log"
    if exports and exports[0].body["spec"].get("suspend"):
        yield "audit_export", exports[0], "the export is suspended"
    for manifest in manifests:
        if manifest.kind == "Cluster" and str(manifest.body.get("apiVersion", "")).startswith("postgresql.cnpg.io/"):
            kinds = {each.kind for each in manifests if each.namespace == manifest.namespace}
            limits = [each.body["spec"].get("retentionPolicy") for each in manifests if each.kind == "ObjectStore"]
            archives = any(each.get("isWALArchiver") for each in manifest.body["spec"].get("plugins") or ())
            if "ScheduledBackup" not in kinds or not archives or not any(limits):
                yield "database_backups", manifest, "it lacks a schedule, an archive of the log or a limit of the age"


def copy_problems(manifests: Sequence[Manifest], facts: StackFacts) -> StackProblems:
    """Find data on one volume outside of development."""
    if not facts.environment or facts.environment == _DEVELOPMENT:
        return
    for manifest in manifests:
        spec = manifest.body.get("spec") or {}
        if manifest.kind == "StatefulSet" and spec.get("replicas", 1) == 1:
            yield "several_copies", manifest, "its data is on one volume"
        if manifest.kind == "Cluster" and spec.get("instances", 1) < 2:  # noqa: PLR2004 - a primary and a replica
            yield "several_copies", manifest, "it has one instance"


def registry_problems(manifests: Sequence[Manifest], facts: StackFacts) -> StackProblems:
    """Find images from other registries than the approved ones."""
    with_images = [(manifest, image) for manifest in manifests for image in dict.fromkeys(images(manifest))]
    for manifest, image in with_images:
        if facts.registries and not image.startswith(tuple(f"{registry}/" for registry in facts.registries)):
            yield "approved_registries", manifest, f"the image {image!r} is from another registry"
    if with_images and facts.layer and not facts.registries:
        yield "registries_are_approved", with_images[0][0], "images may come from every registry"


def tenant_problems(manifests: Sequence[Manifest], facts: StackFacts) -> StackProblems:
    """Check the boundary of a customer: its namespaces, their quotas, and its nodes."""
    if not facts.layer:
        return
    own = f"cloister-{facts.customer}-{facts.environment}"
    is_platform = facts.layer == "platform"
    for manifest in manifests:
        is_shared = manifest.patch or manifest.labels.get(_COMPONENT) in _SHARED_COMPONENTS
        is_chart = manifest.body.get("apiVersion") == "helm.sh"
        pull_secret = manifest.body.get("type") == "kubernetes.io/dockerconfigjson"
        place = manifest.name if manifest.kind == "Namespace" else manifest.namespace
        if place and not (is_platform or is_shared or is_chart or pull_secret) and place not in {own, f"{own}-jobs"}:
            yield "own_namespaces", manifest, f"{place} is not a namespace of {facts.customer}-{facts.environment}"
        if facts.isolation == "nodes" and not is_shared and not _is_on_own_nodes(manifest, facts.customer):
            yield "own_nodes", manifest, "a pod may run on nodes of other customers"
    kinds = {
        (manifest.kind, manifest.namespace)
        for manifest in manifests
        if manifest.kind == "LimitRange" or _admits_no_open_service(manifest)
    }
    for manifest in manifests:
        if manifest.kind == "Deployment" and manifest.labels.get(_COMPONENT) == "api":
            for namespace in (manifest.namespace, f"{manifest.namespace}-jobs"):
                missing = [kind for kind in ("ResourceQuota", "LimitRange") if (kind, namespace) not in kinds]
                if missing:
                    yield "quotas", manifest, f"the namespace {namespace} has no {' and no '.join(missing)}"


def fact_problems(manifests: Sequence[Manifest], facts: StackFacts) -> StackProblems:
    """Check what the operator confirms about the cluster."""
    first = next((each for each in manifests if each.kind == "Namespace"), None)
    if first and facts.layer and not (facts.secrets_encrypted_at_rest or facts.makes_the_cluster):
        yield "secrets_encrypted_at_rest", first, "nothing confirms that the cluster encrypts Secrets"


def account_problems(manifests: Sequence[Manifest]) -> StackProblems:
    """Find service accounts with a token that several workloads share."""
    users = [
        (manifest, str(spec.get("serviceAccountName", "default")))
        for manifest in manifests
        if not manifest.template_of
        for _, spec in pods(manifest)
        if spec.get("automountServiceAccountToken") is not False
    ]
    counts = Counter((manifest.namespace, account) for manifest, account in users)
    for manifest, account in users:
        if account == "default" or counts[manifest.namespace, account] > 1:
            yield "own_service_accounts", manifest, f"its service account {account} is not its own"


def connection_problems(commands: Sequence[Manifest]) -> StackProblems:
    """Find connections to hosts that accept any host key."""
    for command in commands:
        if not command.body["connection"]["hostKey"]:
            yield "host_keys", command, "the connection has no hostKey"


def _admits_no_open_service(manifest: Manifest) -> bool:
    hard = (manifest.body.get("spec") or {}).get("hard") or {}
    return manifest.kind == "ResourceQuota" and all(
        str(hard.get(name)) == "0" for name in ("services.loadbalancers", "services.nodeports")
    )


def _is_on_own_nodes(manifest: Manifest, customer: str) -> bool:
    """Return whether every pod of a manifest, also those of a database's operator, selects nodes of the customer."""
    specs = [spec for _, spec in pods(manifest)]
    if manifest.kind == "Cluster":
        specs.append((manifest.body.get("spec") or {}).get("affinity") or {})
    return all(_selects_nodes_of(spec, customer) for spec in specs)


def _selects_nodes_of(spec: Mapping[str, Any], customer: str) -> bool:
    """Return whether a pod's selector, or each alternative of its affinity, names the customer."""
    if (spec.get("nodeSelector") or {}).get(_CUSTOMER) == customer:
        return True
    # CloudNativePG has the fields of an affinity without the level `affinity`.
    affinity = (spec.get("affinity") or spec).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    return bool(terms) and all(
        any(each.get("key") == _CUSTOMER and each.get("values") == [customer] for each in term["matchExpressions"])
        for term in terms
    )
