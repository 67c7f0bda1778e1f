"""The Pulumi program of a stack: read the stack file, create the resources, export the outputs.

The Pulumi CLI runs ``run`` by ``infra/__main__.py``. The Automation API runs it as an inline program::

    auto.create_or_select_stack(stack_name="acme-dev", project_name="cloister", program=infra.program.run)
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pulumi
import pulumi_kubernetes as kubernetes

from infra.batch_service.deploy import deploy_batch_service
from infra.batch_service.external_access import controller_namespace
from infra.capacity.pools import gpu_capacity, job_pools, placement
from infra.data.database import DATABASE_CA, DatabaseConnection
from infra.data.deploy import deploy_database, deploy_object_store
from infra.data.object_store import ObjectStoreConnection
from infra.hosts.cluster import Hosts
from infra.kubernetes.images import PullSecrets
from infra.kubernetes.kept_data import DataProtection
from infra.monitoring.objects import Monitoring
from infra.policy.assessment import refusal_text, refusals
from infra.policy.facts import PolicyException, StackFacts, StackFactsRecord
from infra.rendering.recording import record
from infra.shared_platform.customers import Registration
from infra.shared_platform.deploy import deploy_platform, deploy_shared_platform
from infra.shared_platform.outputs import expected_outputs, platform_of
from infra.stack_file.aws import POD_IDENTITY_AGENT
from infra.stack_file.reading import ConfigError, StackConfig, read_config
from infra.stack_file.sections import (
    AwsDatabaseSection,
    AwsObjectStoreSection,
    CloudNativePgSection,
    ExternalDatabaseSection,
    S3ObjectStoreSection,
)
from infra.tenancy.credentials import Credentials
from infra.tenancy.job_networks import JobNetworks
from infra.tenancy.namespaces import Namespaces
from infra.tenancy.network import NetworkArgs, Networks, Pods
from infra.tenancy.network_policies import Network
from infra.tenancy.rbac import Rbac
from infra.tenancy.trust import CA_BUNDLE, CaBundle, CaBundleArgs

if TYPE_CHECKING:
    from infra.aws.deploy import AwsCloud


def run() -> None:
    """Read the stack file, check the policies, create the resources, and export the outputs.

    Raises:
        pulumi.RunError: the stack file is invalid, or the stack breaks a mandatory policy; no resource is registered.
    """
    config = _config()
    check_policies(config, stack=pulumi.get_stack())
    _register(config)


def run_unchecked() -> None:
    """Do the same as ``run`` without the check of policies, for those who check the recording.

    Raises:
        pulumi.RunError: the stack file is invalid; no resource is registered.
    """
    _register(_config())


def _config() -> StackConfig:
    try:
        return read_config()
    except ConfigError as error:
        # The CLI prints a RunError without a traceback.
        raise pulumi.RunError(str(error)) from error


def _register(config: StackConfig) -> None:
    for name, value in deploy(config).items():
        pulumi.export(name, value)


def check_policies(config: StackConfig, *, stack: str) -> None:
    """Run the program without an engine first, and check what it registers.

    Args:
        config: the stack file.
        stack: name of the stack.

    Raises:
        pulumi.RunError: the stack breaks a mandatory policy; the message lists every problem.
    """
    platform, references = config.file.platform, {}
    if platform and platform.stack:
        references = {platform.stack: expected_outputs(config.names.jobs_namespace)}

    def program() -> None:
        _register(config)

    # The recorder has its own event loop, and this thread runs one already.
    with ThreadPoolExecutor(max_workers=1) as thread:
        recording = thread.submit(record, program, stack=stack, references=references).result()
    if lines := refusals(recording, today=datetime.now(UTC).date()):
        raise pulumi.RunError(refusal_text(lines, stack=stack))


def deploy(config: StackConfig) -> dict[str, Any]:
    """Create the resources of a stack, from the platform to the batch service, and return the outputs."""
    names, file = config.names, config.file
    StackFactsRecord("facts", stack_facts(config))
    cloud = _cloud(config)
    kubeconfig = cloud.cluster.kubeconfig if cloud else _kubeconfig(config)
    cluster = _provider(config, "cluster", kubeconfig)
    nodes = cloud.nodes(config, pulumi.ResourceOptions(provider=cluster)) if cloud else ()

    def after(*resources: pulumi.Resource) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(provider=cluster, transformations=[wait_for((*nodes, *resources))])

    # For kubectl, on a machine that has no kubeconfig of the new cluster. That of hosts is a secret.
    new_cluster = {"kubeconfig": kubeconfig} if file.hosts else {}
    if cloud:
        new_cluster = cloud.exports()
    if file.layer == "platform":
        return deploy_shared_platform(config, after).exports() | new_cluster
    data_provider = _provider(config, "kept-data", kubeconfig, upsert_existing_objects=True)
    protection = DataProtection(provider=data_provider, keep_data=file.keep_data)
    kuberay_namespace: pulumi.Input[str] = file.kuberay.namespace
    registered: tuple[pulumi.Resource, ...] = ()
    if file.platform:
        kuberay_namespace = platform_of(file.platform, names).kuberay_namespace
        registered = Registration("registration", names, opts=after()).resources
    namespaces = Namespaces(
        "namespaces",
        names=names,
        job_quota=job_quota(config),
        protection=protection,
        has_platform=file.layer == "customer",
        opts=after(*registered),
    )
    foundation = registered + namespaces.resources
    if file.layer == "all":
        foundation += deploy_platform(config, (names.jobs_namespace,), after(*namespaces.resources))
    login = config.docker_config
    if login is not None:
        foundation += PullSecrets("pull-secrets", names=names, docker_config=login, opts=after(*foundation)).secrets

    system_pods = {**placement(config.pools["system"]), "priorityClassName": namespaces.service_priority}
    store = deploy_object_store(config, system_pods, protection, after(*foundation), cloud=cloud)
    postgres = deploy_database(
        config, system_pods, store, protection, after(*foundation, *store.depends_on), cloud=cloud
    )

    secrets = Credentials(
        "credentials",
        names=names,
        owner=postgres.owner,
        service=postgres.service,
        service_key=store.service,
        encryption_keys=config.secret("encryption_keys"),
        receipt_key=config.secret("receipt_key"),
        weights_key=store.job if file.model_weights.kind == "object_store" else None,
        http_engine_api_key=config.secret("http_engine_api_key") if "http_engine_api_key" in config.secrets else None,
        opts=after(*foundation),
    ).secrets
    before_migrations: list[pulumi.Resource] = [*secrets, *postgres.depends_on, *store.depends_on]
    if cloud:
        before_migrations += cloud.identities(config)
    if postgres.ca_pem:
        database_ca = CaBundleArgs(
            names=names,
            pem=postgres.ca_pem,
            config_map=DATABASE_CA,
            component="database",
            namespaces=(names.service_namespace,),
        )
        before_migrations += CaBundle("database-ca", database_ca, opts=after(*foundation)).resources
    if file.trust.ca_bundle:
        ca_bundle = CaBundleArgs(
            names=names,
            pem=file.trust.ca_bundle,
            config_map=CA_BUNDLE,
            component="trust",
            namespaces=(names.service_namespace, names.jobs_namespace),
        )
        before_migrations += CaBundle("ca-bundle", ca_bundle, opts=after(*foundation)).resources
    limits = JobNetworks("job-networks", names, opts=after(*foundation)).resources
    before_migrations += Rbac("access", names, opts=after(*foundation, *limits)).resources
    Network("network", _network_args(config, kuberay_namespace, postgres, store), opts=after(*foundation))

    service = deploy_batch_service(
        config,
        postgres,
        store,
        placement=system_pods,
        jobs_priority=namespaces.jobs_priority,
        before_migrations=before_migrations,
        opts=after(*foundation),
    )
    if file.monitoring:
        # The definitions of Prometheus Operator may be missing: the service must not wait for these objects.
        Monitoring("monitoring", config.names, file.monitoring, opts=after(*foundation))
    return stack_outputs(config, service.api_address) | new_cluster


def wait_for(
    resources: Sequence[pulumi.Resource],
) -> Callable[[pulumi.ResourceTransformationArgs], pulumi.ResourceTransformationResult]:
    """Return a transformation that makes all resources of a component depend on ``resources``.

    The component's own ``depends_on`` does not apply to its children.
    """

    def add_dependencies(args: pulumi.ResourceTransformationArgs) -> pulumi.ResourceTransformationResult:
        opts = pulumi.ResourceOptions.merge(args.opts, pulumi.ResourceOptions(depends_on=list(resources)))
        return pulumi.ResourceTransformationResult(props=args.props, opts=opts)

    return add_dependencies


def _cloud(config: StackConfig) -> "AwsCloud | None":
    """Create the stack's parts on AWS; return None elsewhere."""
    if config.file.aws is None:
        return None
    try:
        # Stacks elsewhere need neither the SDK of AWS nor its large provider.
        from infra.aws.deploy import deploy_cloud
    except ModuleNotFoundError as error:
        if error.name != "pulumi_aws":
            raise
        raise pulumi.RunError(
            "aws: the package pulumi-aws is not installed: run `.venv-pulumi/bin/pip install --constraint "
            "constraints/cpu.txt pulumi-aws` (docs/how-to/aws.md)"
        ) from error

    return deploy_cloud(config, config.file.aws)


def _kubeconfig(config: StackConfig) -> pulumi.Input[str] | None:
    """Return content or path of the kubeconfig; None for the default one. Hosts become a cluster first."""
    file = config.file
    if file.hosts:
        key = config.secret("ssh_private_key")
        return Hosts("hosts", file.hosts, ssh_private_key=key, context=file.kubernetes.context).kubeconfig
    if "kubeconfig" in config.secrets:
        return config.secret("kubeconfig")
    path = file.kubernetes.kubeconfig
    return str(Path(path).expanduser()) if path else None


def _provider(
    config: StackConfig,
    name: str,
    kubeconfig: pulumi.Input[str] | None,
    *,
    upsert_existing_objects: bool | None = None,
) -> kubernetes.Provider:
    context = config.file.kubernetes.context
    return kubernetes.Provider(
        name,
        upsert_existing_objects=upsert_existing_objects,
        kubeconfig=kubeconfig,
        context=context,
        # Without an identifier the provider takes a kubeconfig with a new token for a new cluster.
        cluster_identifier=context,
        # Updated in place, so that pods can always mount them. A digest in the pods' annotations rolls the pods.
        enable_config_map_mutable=True,
        enable_secret_mutable=True,
    )


def job_quota(config: StackConfig) -> dict[str, str]:
    """Return the quota of all jobs together: the limits of the stack file, or the size of its pools."""
    limits = config.file.limits
    pools = job_pools(config.pools)
    cpus = limits.job_cpus or sum(pool.cpus * pool.node_count for pool in pools)
    memory_gib = limits.job_memory_gib or sum(pool.memory_gib * pool.node_count for pool in pools)
    quota = {
        "requests.cpu": str(cpus),
        "limits.cpu": str(cpus),
        "requests.memory": f"{memory_gib}Gi",
        "limits.memory": f"{memory_gib}Gi",
    }
    for resource, count in gpu_capacity(pools).items():
        quota[f"requests.{resource}"] = str(count if limits.job_gpus is None else min(count, limits.job_gpus))
    return quota


def _network_args(
    config: StackConfig,
    kuberay_namespace: pulumi.Input[str],
    postgres: DatabaseConnection,
    store: ObjectStoreConnection,
) -> NetworkArgs:
    names, file = config.names, config.file
    network, api = file.network, file.api
    access = api.ingress or api.gateway
    ingress_namespace = controller_namespace(access) if access else ""
    ingress_networks = tuple(access.controller_networks) if access else ()
    namespace = names.service_namespace

    def port(url: str) -> int:
        parts = urlsplit(url)
        return parts.port or {"http": 80, "https": 443}[parts.scheme]

    database: Pods | Networks = Pods(name="database", namespace=namespace, labels=postgres.pod_labels)
    operator, has_backups = "", False
    match file.database:
        case ExternalDatabaseSection(networks=cidrs):
            database = Networks(name="customer's Postgres", cidrs=tuple(cidrs))
        case AwsDatabaseSection() if file.aws:
            database = Networks(name="Postgres of RDS", cidrs=tuple(file.aws.networks("database")))
        case CloudNativePgSection(operator_namespace=operator, backup=backup):
            has_backups = backup is not None
    object_store: Pods | Networks = Pods(name="object-store", namespace=namespace, labels=store.pod_labels)
    setup: Pods | None = Pods(name="object-store-setup", namespace=namespace, labels=store.setup_labels)
    if isinstance(file.object_store, S3ObjectStoreSection):
        object_store, setup = Networks(name="customer's S3", cidrs=tuple(file.object_store.networks)), None
    if isinstance(file.object_store, AwsObjectStoreSection) and file.aws:
        object_store, setup = Networks(name="endpoint of S3", cidrs=tuple(file.aws.networks("endpoints"))), None
    endpoints = [model.spec.base_url for model in config.catalogue.values() if model.spec.engine == "http"]
    return NetworkArgs(
        names=names,
        database=database,
        database_port=postgres.owner.port,
        cloudnative_pg_namespace=operator,
        has_database_backups=has_backups,
        object_store=object_store,
        object_store_port=port(store.endpoint_url or "https://"),
        object_store_setup=setup,
        plugin=network.plugin,
        kubernetes_api=tuple(network.kubernetes_api.networks),
        kubernetes_api_port=network.kubernetes_api.port,
        kuberay_namespace=kuberay_namespace,
        dns_namespace=network.dns_namespace,
        dns_networks=tuple(network.dns_networks),
        ingress_namespace=ingress_namespace,
        ingress_networks=ingress_networks,
        ingress_by_cilium=access is not None and not (ingress_namespace or ingress_networks),
        client_namespaces=tuple(api.client_namespaces),
        prometheus=_prometheus(config),
        oidc_networks=tuple(network.oidc_networks),
        oidc_hosts=tuple(network.oidc_hosts),
        webhook_networks=tuple(network.webhook_networks),
        webhook_hosts=tuple(network.webhook_hosts),
        syslog_networks=tuple(file.audit_export.networks) if file.audit_export else (),
        syslog_port=file.audit_export.syslog_port if file.audit_export else 0,
        tracing_networks=tuple(file.tracing.networks) if file.tracing else (),
        tracing_port=port(file.tracing.endpoint) if file.tracing else 0,
        endpoint_networks=tuple(network.endpoint_networks) if endpoints else (),
        endpoint_ports=tuple(sorted({port(url) for url in endpoints})),
        identity_networks=(POD_IDENTITY_AGENT,) if file.aws else (),
        secret_networks=tuple(file.aws.networks("endpoints")) if file.aws and file.database.kind == "aws" else (),
    )


def _prometheus(config: StackConfig) -> Pods | None:
    """Return the pods that may read metrics."""
    section = config.file.monitoring
    if section is None:
        return None
    return Pods(name="Prometheus", namespace=section.namespace, labels=section.pod_labels, is_outside=True)


def stack_facts(config: StackConfig) -> StackFacts:
    """Return what policies need to know of the stack file. Its own settings that accept problems become exceptions."""
    file, policy = config.file, config.file.policy
    accepted = [("CLO-DATA-001", "*", "keep_data: false")] if not file.keep_data else []
    ids = {
        "database": "CLO-TLS-002",
        "object_store": "CLO-TLS-003",
        "kuberay_chart": "CLO-TLS-004",
        "http_engine": "CLO-TLS-005",
        "tracing": "CLO-TLS-006",
    }
    accepted += [(ids[name], "*", f"transport.allow_clear_text: {name}") for name in file.transport.allow_clear_text]
    workloads = {"database": "* */database", "object_store": "* */object-store"}
    accepted += [
        ("CLO-DATA-002", workloads[name], f"durability.allow_single_copy: {name}")
        for name in file.durability.allow_single_copy
    ]
    return StackFacts(
        layer=file.layer,
        customer=config.names.customer,
        environment=config.names.environment,
        isolation=file.isolation,
        makes_the_cluster=file.hosts is not None,
        registries=tuple(policy.registries) or ((file.images.mirror,) if file.images.mirror else ()),
        max_retention_days=policy.max_retention_days,
        secrets_encrypted_at_rest=policy.secrets_encrypted_at_rest,
        exceptions=tuple(
            [PolicyException.model_validate(each.model_dump()) for each in policy.exceptions]
            + [
                PolicyException(policy=id_, resource=resource, reason=f"set in the stack file: {key}", owner="operator")
                for id_, resource, key in accepted
            ]
        ),
    )


def stack_outputs(config: StackConfig, api_address: str) -> dict[str, Any]:
    """Return the outputs of a stack by name. None of them is secret."""
    names, context = config.names, config.file.kubernetes.context
    service = f"kubectl --context {context} --namespace {names.service_namespace}"
    jobs = f"kubectl --context {context} --namespace {names.jobs_namespace}"
    first_key = f"{service} exec deploy/api -- cloister keys create first"
    reach_api = f"{service} port-forward svc/api 8000:80"
    base_url, forward = api_address, []
    if not (config.file.api.ingress or config.file.api.gateway):
        base_url, forward = "http://127.0.0.1:8000/v1", [f"{reach_api} &"]
    return {
        # The base URL for clients.
        "api_address": api_address,
        # The namespace of API, reconciler, coordinator, database and object store.
        "service_namespace": names.service_namespace,
        # The namespace of the Ray clusters of jobs.
        "jobs_namespace": names.jobs_namespace,
        # The command that creates an API key and prints it once.
        "first_key": first_key,
        # The command that forwards the API to this machine, for a stack without an ingress or a gateway.
        "reach_api": reach_api,
        # The command that checks cluster and stack, from this machine and from inside the stack's pods.
        "doctor": f"cloister doctor --context {context} --namespace {names.service_namespace}",
        # Commands that open Ray's dashboard of a running job, and metrics.
        "dashboards": {
            "ray": f"{jobs} port-forward $({jobs} get pods --selector ray.io/node-type=head --output name | head -n 1) "
            "8265:8265, then http://127.0.0.1:8265",
            "api_metrics": f"{service} port-forward deploy/api 8000:8000, then http://127.0.0.1:8000/metrics",
            "reconciler_metrics": f"{service} port-forward deploy/reconciler 8001:8001, "
            "then http://127.0.0.1:8001/metrics",
        },
        # Commands for a first look, in this order.
        "next_commands": [
            f"{service} get pods",
            first_key,
            *forward,
            f"curl {base_url}/models --header 'Authorization: Bearer sk-cloister-…'",
            f"{jobs} get rayjobs --watch",
        ],
        # The ids that requests use.
        "models": list(config.catalogue),
        "stays_after_destroy": stays_after_destroy(config),
    }


def stays_after_destroy(config: StackConfig) -> list[str]:
    """Return what `pulumi destroy` leaves behind, and how to remove it."""
    names, file = config.names, config.file
    stays = []
    if file.keep_data:
        in_cluster = {"bundled", "cloudnative_pg"}
        has_volumes = bool({file.database.kind, file.object_store.kind} & in_cluster)
        volumes = " with the volumes of the database and the object store" if has_volumes else ""
        stays.append(
            f"namespace {names.service_namespace}{volumes}, which is protected (keep_data: true); "
            f"`kubectl delete namespace {names.service_namespace}` deletes it permanently"
        )
    if file.database.kind == "external":
        stays.append(f"the database and its roles at {file.database.url.rpartition('@')[2]}")
    if file.aws and file.keep_data:
        stays.append(
            "the VPC, the EKS cluster, and with kind aws the bucket and the database, because of keep_data: true; set "
            "false and run `pulumi up` before `pulumi destroy` to delete them"
        )
    if file.object_store.kind == "s3":
        prefix = file.object_store.prefix or names.object_prefix
        stays.append(f"the objects in s3://{file.object_store.bucket}/{prefix}")
    return stays
