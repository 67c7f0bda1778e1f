"""The wiring of a stack: its stack file becomes the arguments of components, and components wait for each other.

``deploy`` is what `pulumi up` runs, and what an inline program of the Automation API runs::

    auto.create_or_select_stack(stack_name="acme-dev", project_name="cloister", program=infra.program.run)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes

from infra.access import Access, AccessArgs
from infra.batch_service import BatchService, BatchServiceArgs, IngressArgs, api_address
from infra.config import StackConfig
from infra.config_mapping import node_pools
from infra.credentials import Credentials, CredentialsArgs
from infra.database import DatabaseConnection
from infra.database_ca import DatabaseCa, DatabaseCaArgs
from infra.images import PullSecrets, PullSecretsArgs
from infra.namespaces import JobQuota, Namespaces, NamespacesArgs
from infra.network import Network
from infra.object_store import ObjectStoreConnection
from infra.outputs import StackOutputs, stack_outputs
from infra.pools import placement
from infra.stack_data import database, object_store
from infra.stack_platform import platform
from infra.stack_service import network_args, ray_job_files, service_settings
from infra.transformations import after


@dataclass(frozen=True, slots=True, kw_only=True)
class _Foundation:
    """What everything else of a stack stands on."""

    provider: kubernetes.Provider
    namespaces: Namespaces
    before: tuple[pulumi.Resource, ...]

    def opts(self, *more: pulumi.Resource) -> pulumi.ResourceOptions:
        """Of a component whose resources wait for the namespaces, and for ``more``."""
        return pulumi.ResourceOptions(provider=self.provider, transformations=[after([*self.before, *more])])


def deploy(config: StackConfig) -> StackOutputs:
    """Makes every resource of a stack.

    Args:
        config: the stack file.

    Returns:
        What the stack exports.
    """
    names, file = config.names, config.file
    foundation = _foundation(config)
    where = _placement(foundation.namespaces)
    store = object_store(config, where, foundation.opts())
    postgres = database(config, where, store, foundation.opts(*store.depends_on))
    credentials = Credentials("credentials", _credentials(config, postgres, store), opts=foundation.opts())
    before: list[pulumi.Resource] = [*credentials.secrets, *postgres.depends_on, *store.depends_on]
    if postgres.ca_pem:
        certificate = DatabaseCa(
            "database-ca", DatabaseCaArgs(names=names, pem=postgres.ca_pem), opts=foundation.opts()
        )
        before += certificate.made
    before += Access("access", AccessArgs(names=names), opts=foundation.opts()).made
    Network("network", network_args(config, postgres, store), opts=foundation.opts())
    ingress = _ingress(config)
    templates = ray_job_files(config, store, priority_class=foundation.namespaces.jobs_priority)
    BatchService(
        "batch-service",
        BatchServiceArgs(
            settings=service_settings(config, postgres, store, templates, where),
            models_yaml=config.models_yaml,
            ray_job_templates=templates,
            replicas=file.api.replicas,
            max_replicas=file.api.max_replicas,
            ingress=ingress,
            before_migrations=before,
        ),
        opts=foundation.opts(),
    )
    return stack_outputs(
        names=names,
        context=file.kubernetes.context,
        api_address=api_address(names, ingress),
        has_ingress=ingress is not None,
        models=tuple(config.catalogue.models),
        stays=_stays(config),
    )


def _foundation(config: StackConfig) -> _Foundation:
    provider = _provider(config)
    made = platform(config, pulumi.ResourceOptions(provider=provider))
    # The operator is there before the namespaces, and so leaves after them: it ends the RayJobs that are in them.
    namespaces = Namespaces(
        "namespaces",
        NamespacesArgs(names=config.names, job_quota=job_quota(config), keep_data=config.file.keep_data),
        opts=pulumi.ResourceOptions(provider=provider, transformations=[after(made)]),
    )
    before = namespaces.made
    if secret := config.file.images.pull_secret:
        args = PullSecretsArgs(
            names=config.names,
            registry=secret.registry,
            username=secret.username,
            password=config.secret("registry_password"),
        )
        opts = pulumi.ResourceOptions(provider=provider, transformations=[after(before)])
        before = (*before, *PullSecrets("pull-secrets", args, opts=opts).secrets)
    return _Foundation(provider=provider, namespaces=namespaces, before=before)


def _provider(config: StackConfig) -> kubernetes.Provider:
    section = config.file.kubernetes
    kubeconfig: pulumi.Input[str] | None = None
    if "kubeconfig" in config.secrets:
        kubeconfig = config.secret("kubeconfig")
    elif section.kubeconfig:
        kubeconfig = str(Path(section.kubeconfig).expanduser())
    return kubernetes.Provider(
        "cluster",
        kubeconfig=kubeconfig,
        context=section.context,
        # Without an identifier of its own a new token in the kubeconfig would look like a new cluster.
        cluster_identifier=section.context,
        # Changed in place: what pods mount is never gone in between. A digest in their annotations rolls them.
        enable_config_map_mutable=True,
        enable_secret_mutable=True,
    )


def _placement(namespaces: Namespaces) -> dict[str, Any]:
    return {**placement("system"), "priorityClassName": namespaces.service_priority}


def _credentials(config: StackConfig, postgres: DatabaseConnection, store: ObjectStoreConnection) -> CredentialsArgs:
    return CredentialsArgs(
        names=config.names,
        owner=postgres.owner,
        job=postgres.job,
        service_key=(store.service.access_key_id, store.service.secret_access_key),
        job_key=(store.job.access_key_id, store.job.secret_access_key),
        http_lane_api_key=config.secret("http_lane_api_key") if "http_lane_api_key" in config.secrets else None,
    )


def _ingress(config: StackConfig) -> IngressArgs | None:
    section = config.file.api.ingress
    if section is None:
        return None
    return IngressArgs(
        host=section.host,
        class_name=section.class_name,
        tls_secret=section.tls.secret_name or "api-tls",
        cluster_issuer=section.tls.cluster_issuer or "",
        annotations=section.annotations,
    )


def job_quota(config: StackConfig) -> JobQuota:
    """What all jobs of the stack may hold at the same time: its limits, or all that its pools have."""
    limits = config.file.limits
    pools = [pool for name, pool in node_pools(config.file.node_pools).items() if name != "system"]
    cpus = sum(pool.cpus * pool.node_count for pool in pools)
    memory_gib = sum(pool.memory_gib * pool.node_count for pool in pools)
    gpus = sum(pool.gpus_per_node * pool.node_count for pool in pools)
    return JobQuota(
        cpus=limits.job_cpus or cpus,
        memory_gib=limits.job_memory_gib or memory_gib,
        gpus=gpus if limits.job_gpus is None else limits.job_gpus,
    )


def _stays(config: StackConfig) -> list[str]:
    """What a destroy leaves, by name and with the way to remove it."""
    names, file = config.names, config.file
    if file.database.kind == "external" and file.object_store.kind == "s3":
        inside: list[str] = []
    else:
        inside = [
            part.kind for part in (file.database, file.object_store) if part.kind in ("bundled", "cloudnative_pg")
        ]
    left = []
    if file.keep_data:
        volumes = " with the volumes of the database and the object store" if inside else ""
        left.append(
            f"namespace {names.service_namespace}{volumes}, which is protected (keep_data: true); "
            f"`kubectl delete namespace {names.service_namespace}` removes it for good"
        )
    if file.database.kind == "external":
        left.append(f"the database and its roles at {file.database.url.rpartition('@')[2]}")
    if file.object_store.kind == "s3":
        prefix = file.object_store.prefix or names.object_prefix
        left.append(f"the objects in s3://{file.object_store.bucket}/{prefix}")
    return left
