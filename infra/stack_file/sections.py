"""The sections of a stack file: types, defaults, meaning and example of every key.

``reading`` validates a stack file with them, ``infra.rendering.configuration_page`` generates docs/configuration.md.
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from infra.stack_file.aws import AwsSection
from infra.stack_file.cluster_sections import (
    CustomerSection,
    DevicePluginSection,
    ImagesSection,
    KubeRaySection,
    KubernetesSection,
    NetworkSection,
    NodePoolsSection,
    PlatformSection,
)
from infra.stack_file.hosts import HostsSection
from infra.stack_file.policy import PolicySection
from infra.stack_file.values import (
    Certificates,
    Cidr,
    Cidrs,
    ClusterName,
    CronSchedule,
    Customer,
    DnsLabel,
    Environment,
    GatewayName,
    HostName,
    Labels,
    Moment,
    PostgresUrl,
    WebUrl,
)
from ray_job.contract.cluster import GATEWAY_LISTENER, MIN_POSTGRES
from service.config_sections import Section, key
from service.model_catalogue import AcceleratorSection, Count, ModelEntry, ModelsAtRunTimeSection, PriceSection
from service.oidc.section import OidcSection
from service.traces import DEFAULT_SEGMENTS

PROJECT: Final = "cloister"
"""The Pulumi project: the namespace of the keys in a stack file."""


class VolumeSection(Section):
    """A persistent volume. It remains when the stack is destroyed."""

    size_gib: Count = key("capacity", 100, unit="GiB")
    storage_class: str | None = key("the storage class; without it the cluster's default", "fast-ssd", default=None)


class BundledDatabaseSection(Section):
    """One Postgres on a volume, without backups: for development."""

    kind: Literal["bundled"] = key("bundled", "bundled")
    volume: VolumeSection = key("see below", {}, default=VolumeSection(size_gib=20))


class BackupSection(Section):
    """Base backups and the write-ahead log in the stack's object store; needs CloudNativePG's Barman Cloud plugin.

    In the bundled object store they protect against mistakes and a lost database volume, not against a lost cluster.
    """

    schedule: CronSchedule = key(
        "start of a base backup, a cron schedule of six fields, from seconds to weekday",
        "0 30 2 * * *",
        default="0 0 3 * * *",
    )
    retention_days: Count = key("how far back a recovery can reach", 30, default=14, unit="days")


class RecoverySection(Section):
    """Start from a backup instead of an empty database."""

    from_server: ClusterName = key("the name under which the backups were written", "database")
    until: Moment | None = key(
        "the moment to go back to, RFC 3339; without it the latest one", "2030-01-31T12:00:00Z", default=None
    )


class CloudNativePgSection(Section):
    """Postgres managed by CloudNativePG, whose operator the cluster must already run."""

    kind: Literal["cloudnative_pg"] = key("cloudnative_pg", "cloudnative_pg")
    postgres_version: Annotated[int, Field(ge=MIN_POSTGRES)] = key(
        "major version in `images.postgres`, one of CloudNativePG's operand images", 18, default=18
    )
    instances: Count = key("one primary and its replicas", 3, default=3, unit="pods")
    volume: VolumeSection = key("of each instance", {}, default=VolumeSection(size_gib=50))
    operator_namespace: DnsLabel = key("namespace of the operator", "cnpg-system", default="cnpg-system")
    backup: BackupSection | None = key("see below; without it the database has no backups", {}, default=None)
    recovery: RecoverySection | None = key("see below", {}, default=None)


class ExternalDatabaseSection(Section):
    """The customer's own Postgres, 15 or newer. The database and its roles must exist."""

    kind: Literal["external"] = key("external", "external")
    url: PostgresUrl = key(
        "role that owns the database, host, port, database and TLS, without a password",
        "postgresql://cloister_acme_prod@db.acme.example:5432/cloister_acme_prod?sslmode=verify-full",
    )
    service_role: str | None = key(
        "role that the service logs in with; it owns nothing, and the migrations grant it what it needs. Without it, "
        "the service logs in as the owner, which can change the audit log",
        "cloister_acme_prod_service",
        default=None,
    )
    networks: Cidrs = key("addresses of the database; pods reach it only there", ["10.20.0.0/24"])
    ca_certificate: str | None = key(
        "certificate of the authority that signed the server's certificate, PEM; `sslmode=verify-ca` and "
        "`verify-full` need it, or `trust.ca_bundle`",
        "-----BEGIN CERTIFICATE-----…",
        default=None,
    )


class AwsDatabaseSection(Section):
    """Amazon RDS for PostgreSQL in the VPC of the section `aws`: two zones, encrypted, without a password to keep."""

    kind: Literal["aws"] = key("aws", "aws")
    ca_certificate: str = key(
        "certificates of RDS in the region, PEM, from https://truststore.pki.rds.amazonaws.com",
        "-----BEGIN CERTIFICATE-----…",
    )
    postgres_version: Annotated[int, Field(ge=MIN_POSTGRES)] = key("major version", 17, default=17)
    instance_class: str = key("instance class", "db.m7g.xlarge", default="db.m7g.large")
    storage_gib: Annotated[int, Field(ge=20)] = key(
        "storage at the start, which grows up to four times as much", 200, default=100, unit="GiB"
    )
    backup_days: Annotated[int, Field(ge=7, le=35)] = key(
        "how far back a recovery to a point in time can reach", 35, default=14, unit="days"
    )


DatabaseSection = Annotated[
    BundledDatabaseSection | CloudNativePgSection | ExternalDatabaseSection | AwsDatabaseSection,
    Field(discriminator="kind"),
]


class BundledObjectStoreSection(Section):
    """versitygw, an S3 server, on one volume."""

    kind: Literal["bundled"] = key("bundled", "bundled")
    volume: VolumeSection = key("see below", {}, default=VolumeSection(size_gib=100))


class S3ObjectStoreSection(Section):
    """The customer's own S3. Its secret key is the secret `object_store_secret_access_key`."""

    kind: Literal["s3"] = key("s3", "s3")
    bucket: str = key("the bucket, which must exist", "acme-llm-batch")
    prefix: str | None = key(
        "prefix of the stack's objects; without it `customer/environment`", "cloister/prod", default=None
    )
    endpoint_url: WebUrl = key("URL of the S3 server", "https://s3.acme.example")
    region: str = key("the region that signatures name", "eu-central-1", default="us-east-1")
    access_key_id: str = key("public half of the key, which can reach this prefix only", "CLOISTERACMEPROD")
    job_access_key_id: str | None = key(
        "another key for the copy of weights to the pods of jobs, which may read them only "
        "(docs/how-to/deploy.md); its secret half is the secret `object_store_job_secret_access_key`",
        "CLOISTERACMEPRODJOBS",
        default=None,
    )
    networks: Cidrs = key("addresses of the S3 server; pods reach it only there", ["10.30.0.10/32"])


class AwsObjectStoreSection(Section):
    """A bucket of Amazon S3 that the stack creates, with its own key. Pods reach it by their identity."""

    kind: Literal["aws"] = key("aws", "aws")


ObjectStoreSection = Annotated[
    BundledObjectStoreSection | S3ObjectStoreSection | AwsObjectStoreSection, Field(discriminator="kind")
]


class ImageWeightsSection(Section):
    """Each model's `source` is a directory in its Ray image."""

    kind: Literal["image"] = key("image", "image")


class VolumeWeightsSection(Section):
    """A volume with the models' directories, mounted read-only at /models of every worker."""

    kind: Literal["volume"] = key("volume", "volume")
    claim: DnsLabel = key(
        "the persistent volume claim in the jobs' namespace, readable by many nodes (ReadOnlyMany)", "model-weights"
    )


class ObjectStoreWeightsSection(Section):
    """The stack's object store holds the models' directories. Each worker copies its model to /models at start."""

    kind: Literal["object_store"] = key("object_store", "object_store")
    prefix: str = key("prefix of the models in the stack's bucket", "models", default="models")
    cache_gib: Count = key("disk of a worker's node for a model without `weights_gib`", 200, default=100, unit="GiB")


ModelWeightsSection = Annotated[
    ImageWeightsSection | VolumeWeightsSection | ObjectStoreWeightsSection, Field(discriminator="kind")
]


class TlsSection(Section):
    """Source of the certificate: one of the two keys."""

    secret_name: DnsLabel | None = key(
        "a Secret of type kubernetes.io/tls in the service's namespace", "batch-tls", default=None
    )
    cluster_issuer: str | None = key("a ClusterIssuer of cert-manager", "acme-ca", default=None)


class ExternalAccessSection(Section):
    """Keys that Ingress and Gateway have in common."""

    host: HostName = key("host name of the API", "batch.acme.example")
    controller_namespace: DnsLabel | None = key(
        "namespace of the pods that requests come from: of the ingress controller, or of the gateway's data plane. "
        "Without it: that of the controller's own chart; with Cilium and a gateway, Cilium itself",
        "kube-system",
        default=None,
    )
    controller_networks: list[Cidr] = key(
        "instead of the namespace: addresses of the nodes, for a controller on their network (`hostNetwork`), which no "
        "namespace selects",
        ["10.0.0.0/24"],
        default=[],
    )


class IngressSection(ExternalAccessSection):
    """Access for clients outside of the cluster by an Ingress, always by TLS."""

    controller: Literal["traefik", "haproxy", "nginx", "contour", "custom"] = key(
        "the ingress controller; sets class, namespace, and annotations for large uploads and slow answers. "
        "`nginx` is ingress-nginx, which was retired in March 2026; `custom` needs `class_name`",
        "traefik",
    )
    class_name: str | None = key(
        "the ingress class; without it that of the controller's own chart", "traefik", default=None
    )
    annotations: dict[str, str] = key(
        "more annotations. With `custom`: what allows bodies of 210 MB and answers that take minutes",
        {"example.com/max-body": "210m"},
        default={},
    )
    tls: TlsSection = key("see below", {"cluster_issuer": "acme-ca"})


class GatewaySection(ExternalAccessSection):
    """Access for clients outside of the cluster by a Gateway that exists, instead of an Ingress: an HTTPRoute."""

    gateway: GatewayName = key(
        "namespace and name of the Gateway, whose listener must allow routes of the service's namespace", "edge/public"
    )
    section_name: DnsLabel = key(
        "name of the Gateway's listener with TLS; no other listener serves the API", "https", default=GATEWAY_LISTENER
    )


class ApiSection(Section):
    """The HTTP API."""

    replicas: Annotated[int, Field(ge=2)] = key("pods at rest, spread over the nodes", 3, default=2, unit="pods")
    max_replicas: Annotated[int, Field(ge=2)] = key("the most pods under load", 8, default=4, unit="pods")
    ingress: IngressSection | None = key(
        "see below; without it and `gateway`, only clients inside the cluster can reach the API", {}, default=None
    )
    gateway: GatewaySection | None = key("see below; instead of `ingress`", {}, default=None)
    trusted_proxies: list[Cidr] = key(
        "addresses of the ingress controller, and of load balancers in front of it, as the next one sees them. The "
        "audit log and the limit of wrong keys then take the client's address from their `X-Forwarded-For`; whoever "
        "connects from these addresses can state any",
        ["10.0.5.0/24"],
        default=[],
    )
    client_namespaces: list[DnsLabel] = key(
        "namespaces whose pods may call the API inside the cluster", ["acme-etl"], default=[]
    )
    max_key_days: Annotated[int, Field(ge=1, le=36_500)] | None = key(
        "how long after its creation an API key expires at the latest, also one that exists; without it only keys "
        "that were created with an expiry expire",
        90,
        default=None,
        unit="days",
    )


class AuditExportSection(Section):
    """A CronJob that sends new entries of the audit log to a syslog server every five minutes (RFC 5425)."""

    syslog_host: HostName = key(
        "host name of the syslog server; a public authority or one of `trust.ca_bundle` signed its certificate",
        "syslog.acme.example",
    )
    syslog_port: Annotated[int, Field(ge=1, le=65_535)] = key("TCP port of its TLS listener", 6514, default=6514)
    networks: Cidrs = key("addresses of the syslog server; pods reach it only there", ["10.70.0.10/32"])


class TracingSection(Section):
    """Traces of batches, which the service sends to an OpenTelemetry collector (docs/how-to/tracing.md)."""

    endpoint: WebUrl = key(
        "URL of the collector's receiver for OTLP over HTTP, without `/v1/traces`", "https://otel.acme.example:4318"
    )
    networks: Cidrs = key("addresses of the collector; pods reach it only there", ["10.80.0.10/32"])
    sampled_segments: Annotated[float, Field(ge=0, le=1)] = key(
        "share of the segments with spans of their own; the first one of each batch always has them",
        0.1,
        default=DEFAULT_SEGMENTS,
    )


class JobsSection(Section):
    """Time limits of the Ray cluster of a job."""

    start_limit_s: Annotated[int, Field(ge=60)] = key(
        "how long the head and the first worker may take to start, including the pull of the image, and how long a "
        "job waits for the named `nodes` of its GPU pool",
        3600,
        default=1800,
        unit="seconds",
    )
    stuck_limit_s: Annotated[int, Field(ge=10)] = key(
        "how long a pod may lack an image, a Secret or a volume before its job fails",
        600,
        default=300,
        unit="seconds",
    )
    idle_timeout_s: Count = key("how long an idle worker is kept", 120, default=60, unit="seconds")
    # The launcher reads the result of a job from its RayJob. A RayJob deleted too early would run again.
    keep_finished_s: Annotated[int, Field(ge=300)] = key(
        "how long the RayJob of a finished job is kept for inspection", 3600, default=600, unit="seconds"
    )


class LimitsSection(Section):
    """The most of the cluster that the stack uses."""

    max_running_jobs: Count = key(
        "jobs that run at the same time on each accelerator; fewer where an engine takes several nodes and not all "
        "engines of all jobs have room",
        4,
        default=2,
        unit="jobs",
    )
    job_cpus: Count | None = key(
        "CPUs of all jobs together; without it those of all pools", 64, default=None, unit="CPUs"
    )
    job_memory_gib: Count | None = key(
        "memory of all jobs together; without it that of all pools", 480, default=None, unit="GiB"
    )
    job_gpus: Annotated[int, Field(ge=0)] | None = key(
        "GPUs of all jobs together, for each extended resource; without it those of all pools",
        8,
        default=None,
        unit="GPUs",
    )


class MonitoringSection(Section):
    """Prometheus, which may read the metrics of the stack's pods and of the Ray clusters of its jobs."""

    prometheus: Literal["none", "operator"] = key(
        "`operator`: the cluster has Prometheus Operator, and the stack creates its ServiceMonitor, PodMonitors and "
        "PrometheusRule. `none`: the operator of the stack configures Prometheus",
        "operator",
        default="none",
    )
    namespace: DnsLabel = key("namespace of Prometheus", "monitoring", default="monitoring")
    pod_labels: Labels = key(
        "labels of the pods of Prometheus; no other pod of the namespace can read metrics",
        {"app.kubernetes.io/name": "prometheus"},
        default={"app.kubernetes.io/name": "prometheus"},
    )
    object_labels: dict[str, str] = key(
        "labels by which Prometheus Operator selects monitors and rules; it ignores objects without them",
        {"release": "kube-prometheus-stack"},
        default={},
    )
    dcgm_namespace: DnsLabel | None = key(
        "namespace of the DCGM exporter of NVIDIA's GPU Operator, for the metrics of GPUs; with `operator` only",
        "gpu-operator",
        default=None,
    )
    dashboards: bool = key(
        "create ConfigMaps with dashboards, with the label `grafana_dashboard` that Grafana's sidecar selects",
        True,
        default=False,
    )
    runbook_url: WebUrl | None = key(
        "where your operators read docs/runbook.md; alerts link to it",
        "https://wiki.acme.example/cloister/runbook",
        default=None,
    )


class TransportSection(Section):
    """Encryption in transit. Database, object store, chart, endpoints and collector must have verified TLS."""

    allow_clear_text: list[Literal["database", "object_store", "kuberay_chart", "http_engine", "tracing"]] = key(
        "exceptions: `database` and `object_store` (the bundled ones have no TLS), `kuberay_chart` (its repository), "
        "`http_engine` (`base_url` of models), `tracing` (its `endpoint`)",
        ["database", "object_store"],
        default=[],
    )


class DurabilitySection(Section):
    """Copies of the data. Outside of the environment `dev`, one volume is not enough for data that must last."""

    allow_single_copy: list[Literal["database", "object_store"]] = key(
        "exceptions: `database` and `object_store` (the bundled ones keep one copy on one volume, and a lost volume "
        "loses all of it)",
        ["object_store"],
        default=[],
    )


class TrustSection(Section):
    """Private certificate authorities, which the pods of service and jobs trust besides the public ones."""

    ca_bundle: Certificates | None = key(
        "their certificates in PEM: for S3, endpoints of the `http` engine, receivers of webhooks and traces, and a "
        "database without `ca_certificate`",
        "-----BEGIN CERTIFICATE-----…",
        default=None,
    )


class StackFile(Section):
    """All keys of a stack file except the secrets."""

    layer: Literal["platform", "customer", "all"] = key(
        "`platform`: what all customers of a cluster share; `customer`: one customer and environment on a platform; "
        "`all`: both in one stack (docs/how-to/platform.md)",
        "customer",
        default="all",
    )
    platform: PlatformSection | None = key("layer `customer`: see below", {}, default=None)
    customers: list[CustomerSection] = key("layer `platform`: the stacks that may use it; see below", [], default=[])
    isolation: Literal["shared", "nodes"] = key(
        "layer `customer`: run pods on nodes of all customers, or on those that the platform's stack gives this one",
        "nodes",
        default="shared",
    )
    customer: Customer = key("name of the customer that the stack serves", "acme")
    environment: Environment = key("name of this stack among the customer's stacks", "prod")
    kubernetes: KubernetesSection = key("see below", {})
    hosts: HostsSection | None = key(
        "bare hosts to make the cluster of; see below. Without it the cluster exists", {}, default=None
    )
    aws: AwsSection | None = key(
        "a private VPC with an EKS cluster to create; see below. Without it the cluster exists", {}, default=None
    )
    network: NetworkSection = key("see below", {})
    images: ImagesSection = key("see below", {})
    accelerators: dict[str, AcceleratorSection] = key(
        "GPUs that the table of accelerators lacks, by name; see below", {}, default={}
    )
    node_pools: NodePoolsSection = key("see below", {})
    device_plugin: DevicePluginSection = key("see below", {}, default=DevicePluginSection())
    kuberay: KubeRaySection = key("see below", {}, default=KubeRaySection())
    database: DatabaseSection = key("see below", {}, default=BundledDatabaseSection(kind="bundled"))
    object_store: ObjectStoreSection = key("see below", {}, default=BundledObjectStoreSection(kind="bundled"))
    models: Annotated[list[ModelEntry], Field(min_length=1)] = key("the models; see below", [])
    prices: dict[str, PriceSection] = key(
        "prices of accelerators by name, from which the costs of batches follow; see below", {}, default={}
    )
    models_at_run_time: ModelsAtRunTimeSection = key("see below", {}, default=ModelsAtRunTimeSection())
    transport: TransportSection = key("see below", {}, default=TransportSection())
    durability: DurabilitySection = key("see below", {}, default=DurabilitySection())
    policy: PolicySection = key("see below", {}, default=PolicySection())
    trust: TrustSection = key("see below", {}, default=TrustSection())
    model_weights: ModelWeightsSection = key("see below", {}, default=ImageWeightsSection(kind="image"))
    api: ApiSection = key("see below", {}, default=ApiSection())
    oidc: OidcSection | None = key("see below; without it the API accepts API keys only", {}, default=None)
    audit_export: AuditExportSection | None = key(
        "see below; without it the audit log stays in the stack, unless `cloister audit export` is run by hand",
        {},
        default=None,
    )
    monitoring: MonitoringSection | None = key(
        "see below; without it no pod can read the metrics of the stack", {}, default=None
    )
    tracing: TracingSection | None = key("see below; without it there are no traces", {}, default=None)
    jobs: JobsSection = key("see below", {}, default=JobsSection())
    limits: LimitsSection = key("see below", {}, default=LimitsSection())
    keep_data: bool = key(
        "protect the volumes and what is needed to read them; they remain when the stack is destroyed",
        False,
        default=True,
    )
    retention_days: Annotated[int, Field(ge=1, le=3650)] = key(
        "how long files and finished batches are kept at most", 90, default=30, unit="days"
    )
    usage_retention_days: Annotated[int, Field(ge=31, le=36_500)] = key(
        "how long usage and costs by day, project and model are kept; they outlive files and batches",
        3650,
        default=1095,
        unit="days",
    )
    workspace_gib: Count = key(
        "disk of each pod of API and reconciler, for uploads and for the results of batches that are being assembled",
        20,
        default=5,
        unit="GiB",
    )
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "the lowest level that API, reconciler and coordinator log", "warning", default="info"
    )
