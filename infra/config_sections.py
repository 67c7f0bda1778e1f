"""The sections of a stack file, one model for each: types, defaults, meaning and example of every key.

``infra.config`` reads a stack file by them, ``infra.config_reference`` makes docs/configuration.md of them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.config_values import (
    Cidr,
    Cidrs,
    Count,
    CronSchedule,
    DnsLabel,
    HostName,
    Image,
    Moment,
    Nodes,
    Port,
    PostgresUrl,
    Registry,
    WebUrl,
)

_EXAMPLE_DIGEST = "sha256:" + "0123456789abcdef" * 4


class Section(BaseModel):
    """What all sections have in common: no key that is not known, and no value that is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def key(meaning: str, example: Any, *, default: Any = ..., unit: str = "") -> Any:
    """A key of a section, with what the reference page says of it. Without a default the key is required."""
    return Field(default, description=meaning, examples=[example], json_schema_extra={"unit": unit})


class Kubernetes(Section):
    """The cluster that the stack goes to."""

    context: str = key("the context of the kubeconfig: a stack never lands on whatever is current", "factory")
    kubeconfig: str | None = key(
        "the path of the kubeconfig; without it and without the secret `kubeconfig`: $KUBECONFIG or ~/.kube/config",
        "~/.kube/factory",
        default=None,
    )


class PullSecret(Section):
    """The account that pulls images; its password is the secret `registry_password`."""

    registry: Registry = key("the registry's host, and its port", "registry.acme.example")
    username: str = key("the account", "cloister-pull")


class RayImage(Section):
    """The image of one lane, and what is in it, where that is not what the lane's Containerfile pins."""

    image: Image = key("the image", f"registry.acme.example/cloister/ray-a10g@{_EXAMPLE_DIGEST}")
    ray: str | None = key("its version of Ray; without it the lane's own", "2.60.0", default=None)
    vllm: str | None = key("its version of vLLM; without it the lane's own", "0.29.0", default=None)


class Images(Section):
    """Every image, by digest: what runs is what was reviewed."""

    service: Image = key("API, reconciler and migrations", f"registry.acme.example/cloister/service@{_EXAMPLE_DIGEST}")
    ray_cpu: RayImage | None = key("Ray and vLLM for models on CPUs; see below", {}, default=None)
    ray_v100: RayImage | None = key("Ray and vLLM for models on V100s; see below", {}, default=None)
    ray_a10g: RayImage | None = key("Ray and vLLM for models on A10Gs; see below", {}, default=None)
    postgres: Image | None = key(
        "the database: bundled, the official image on Debian; CloudNativePG, one of its operand images",
        f"registry.acme.example/mirror/library/postgres@{_EXAMPLE_DIGEST}",
        default=None,
    )
    versitygw: Image | None = key(
        "the bundled object store", f"registry.acme.example/mirror/versity/versitygw@{_EXAMPLE_DIGEST}", default=None
    )
    kuberay_operator: Image | None = key(
        "KubeRay's operator, where this stack installs it",
        f"registry.acme.example/mirror/kuberay/operator@{_EXAMPLE_DIGEST}",
        default=None,
    )
    device_plugin: Image | None = key(
        "NVIDIA's device plugin, where this stack installs it",
        f"registry.acme.example/mirror/nvidia/k8s-device-plugin@{_EXAMPLE_DIGEST}",
        default=None,
    )
    mirror: Registry | None = key(
        "pull every image from here instead: the registry's host in each reference is replaced by this",
        "registry.acme.example/mirror",
        default=None,
    )
    pull_secret: PullSecret | None = key("the account that pulls images; without it none is needed", {}, default=None)


def _max_nodes(example: int) -> Any:
    return key(
        "the most nodes that an autoscaler or a managed node group makes; that gives them the pool's label and taint",
        example,
        default=None,
        unit="nodes",
    )


class SystemPool(Section):
    """The nodes of API, reconciler, operator, database and object store."""

    nodes: Nodes | None = key(
        "the nodes' names, as `kubectl get nodes` shows them; this or `max_nodes`", ["sys-1", "sys-2"], default=None
    )
    max_nodes: Count | None = _max_nodes(3)


class CpuPool(Section):
    """The nodes of Ray heads and of the CPU stages, and of models on CPUs."""

    nodes: Nodes | None = key("the nodes' names; this or `max_nodes`", ["cpu-1", "cpu-2"], default=None)
    max_nodes: Count | None = _max_nodes(4)
    cpus: Count = key("of one node: its Allocatable, less what DaemonSets request there", 16, unit="CPUs")
    memory_gib: Count = key("of one node: its Allocatable, less what DaemonSets request there", 60, unit="GiB")
    max_workers: Count = key("the most CPU workers of one job", 4, default=2, unit="pods")


class GpuPool(Section):
    """The nodes of one kind of GPU. Each worker of a model gets one model's GPUs of one node."""

    nodes: Nodes | None = key("the nodes' names; this or `max_nodes`", ["v100-1", "v100-2"], default=None)
    max_nodes: Count | None = _max_nodes(8)
    gpus_per_node: Count = key("the GPUs of one node", 4, unit="GPUs")
    gpu_memory_gib: Count = key("the memory of one GPU", 32, unit="GiB")
    cpus: Count = key("of one node: its Allocatable, less what DaemonSets request there", 32, unit="CPUs")
    memory_gib: Count = key("of one node: its Allocatable, less what DaemonSets request there", 240, unit="GiB")
    max_workers: Count = key("the most GPU workers of one job", 4, default=2, unit="pods")


class NodePools(Section):
    """Which nodes do what. Exactly one stack of a cluster labels and taints them."""

    manage_nodes: bool = key(
        "label and taint the nodes; `false` where another stack or the cluster's own tools do", False, default=True
    )
    system: SystemPool = key("see below", {})
    cpu: CpuPool = key("see below", {})
    v100: GpuPool | None = key("see below; `accelerator: v100` in `models` needs it", {}, default=None)
    a10g: GpuPool | None = key("see below; `accelerator: a10g` in `models` needs it", {}, default=None)


class DevicePlugin(Section):
    """NVIDIA's device plugin. Exactly one stack of a cluster installs it, or the cluster's own tools do."""

    install: bool = key("run it on the nodes of the pools `v100` and `a10g`", True, default=False)


class KubeRayChart(Section):
    """Where Helm finds the operator's chart."""

    repository: WebUrl = key(
        "the Helm repository, https:// or oci://",
        "oci://registry.acme.example/charts",
        default="https://ray-project.github.io/kuberay-helm",
    )
    version: str = key("the chart's version", "1.6.1", default="1.6.1")


class KubeRay(Section):
    """KubeRay's operator. Exactly one stack of a cluster installs it, or the cluster's own tools do."""

    install: Literal["helm", "none"] = key("by its Helm chart, or not at all", "none", default="helm")
    namespace: DnsLabel = key("where the operator runs", "kuberay", default="kuberay-system")
    chart: KubeRayChart = key("see below", {}, default=KubeRayChart())


class Volume(Section):
    """A persistent volume; it stays when the stack is destroyed."""

    size_gib: Count = key("how much it holds", 100, unit="GiB")
    storage_class: str | None = key("the storage class; without it the cluster's default", "fast-ssd", default=None)


class BundledDatabase(Section):
    """One Postgres on a volume, without backups: for development."""

    kind: Literal["bundled"] = key("bundled", "bundled")
    volume: Volume = key("see below", {}, default=Volume(size_gib=20))


class Backup(Section):
    """Base backups and the write-ahead log in the stack's object store; needs CloudNativePG's Barman Cloud plugin."""

    schedule: CronSchedule = key(
        "when a base backup starts: six fields, from seconds to weekday", "0 30 2 * * *", default="0 0 3 * * *"
    )
    retention_days: Count = key("how far back one can go", 30, default=14, unit="days")


class Recovery(Section):
    """Start from a backup instead of from nothing."""

    from_server: DnsLabel = key("the name under which the backups were written", "database")
    until: Moment | None = key(
        "the moment to go back to, RFC 3339; without it the last one", "2030-01-31T12:00:00Z", default=None
    )


class CloudNativePgDatabase(Section):
    """Postgres by CloudNativePG, whose operator the cluster must have already."""

    kind: Literal["cloudnative_pg"] = key("cloudnative_pg", "cloudnative_pg")
    postgres_version: Annotated[int, Field(ge=15)] = key(
        "the major version in `images.postgres`, one of CloudNativePG's operand images", 18, default=18
    )
    instances: Count = key("one primary and its replicas", 3, default=3, unit="pods")
    volume: Volume = key("of each instance", {}, default=Volume(size_gib=50))
    operator_namespace: DnsLabel = key("where the operator runs", "cnpg-system", default="cnpg-system")
    backup: Backup | None = key("see below; without it there is none", {}, default=None)
    recovery: Recovery | None = key("see below", {}, default=None)


class ExternalDatabase(Section):
    """The customer's own Postgres, 15 or newer. The database and both roles exist already."""

    kind: Literal["external"] = key("external", "external")
    url: PostgresUrl = key(
        "role, host, port, database and TLS, without a password",
        "postgresql://cloister_acme_prod@db.acme.example:5432/cloister_acme_prod?sslmode=verify-full",
    )
    job_role: str = key("the role of jobs, which executes one function", "cloister_acme_prod_job")
    networks: Cidrs = key("where the database is: pods reach it there and nowhere else", ["10.20.0.0/24"])
    ca_certificate: str | None = key(
        "who signed the server's certificate, PEM; `sslmode=verify-ca` and `verify-full` need it",
        "-----BEGIN CERTIFICATE-----…",
        default=None,
    )


Database = Annotated[BundledDatabase | CloudNativePgDatabase | ExternalDatabase, Field(discriminator="kind")]


class BundledObjectStore(Section):
    """versitygw, an S3 server, over one volume."""

    kind: Literal["bundled"] = key("bundled", "bundled")
    volume: Volume = key("see below", {}, default=Volume(size_gib=100))


class S3ObjectStore(Section):
    """The customer's own S3; its secret key is the secret `object_store_secret_access_key`."""

    kind: Literal["s3"] = key("s3", "s3")
    bucket: str = key("the bucket, which exists already", "acme-llm-batch")
    prefix: str | None = key(
        "where the stack's objects are in it; without it `customer/environment`", "cloister/prod", default=None
    )
    endpoint_url: WebUrl = key("where the S3 server answers", "https://s3.acme.example")
    region: str = key("the region, as the server wants it in signatures", "eu-central-1", default="us-east-1")
    access_key_id: str = key("the key's public half; the key can reach this prefix only", "CLOISTERACMEPROD")
    job_access_key_id: str | None = key(
        "another key for jobs, with less rights (docs/operate.md); its secret half is the secret "
        "`object_store_job_secret_access_key`",
        "CLOISTERACMEPRODJOBS",
        default=None,
    )
    networks: Cidrs = key("where the S3 server is: pods reach it there and nowhere else", ["10.30.0.10/32"])


ObjectStore = Annotated[BundledObjectStore | S3ObjectStore, Field(discriminator="kind")]


class NoWeights(Section):
    """Every model's `source` is a directory that its Ray image brings along."""

    kind: Literal["image"] = key("image", "image")


class VolumeWeights(Section):
    """A volume with the models' directories, mounted at /models and read-only, at every worker."""

    kind: Literal["volume"] = key("volume", "volume")
    claim: DnsLabel = key(
        "the persistent volume claim in the jobs' namespace; many nodes can read it (ReadOnlyMany)", "model-weights"
    )


class ObjectStoreWeights(Section):
    """The stack's object store holds the models' directories; each worker copies its model to /models at start."""

    kind: Literal["object_store"] = key("object_store", "object_store")
    prefix: str = key("where they are in the stack's bucket", "models", default="models")
    cache_gib: Count = key("disk of a worker's node for a model without `weights_gib`", 200, default=100, unit="GiB")


ModelWeights = Annotated[NoWeights | VolumeWeights | ObjectStoreWeights, Field(discriminator="kind")]


class Tls(Section):
    """Where the certificate comes from: one of the two."""

    secret_name: DnsLabel | None = key(
        "a Secret of type kubernetes.io/tls in the service's namespace", "batch-tls", default=None
    )
    cluster_issuer: str | None = key("a ClusterIssuer of cert-manager", "acme-ca", default=None)


class Ingress(Section):
    """How clients outside of the cluster reach the API: always by TLS."""

    host: HostName = key("the host name of the API", "batch.acme.example")
    class_name: str = key("the ingress class", "nginx", default="nginx")
    annotations: dict[str, str] = key(
        "what a controller other than ingress-nginx must be told: bodies of 210 MB, answers that take minutes",
        {"example.com/max-body": "210m"},
        default={},
    )
    controller_namespace: DnsLabel = key(
        "where the ingress controller runs: requests come from there", "ingress-nginx", default="ingress-nginx"
    )
    tls: Tls = key("see below", {"cluster_issuer": "acme-ca"})


class Api(Section):
    """The HTTP API."""

    replicas: Annotated[int, Field(ge=2)] = key("pods at rest, spread over the nodes", 3, default=2, unit="pods")
    max_replicas: Annotated[int, Field(ge=2)] = key("the most pods under load", 8, default=4, unit="pods")
    ingress: Ingress | None = key(
        "see below; without it the API can be reached inside the cluster only", {}, default=None
    )
    client_namespaces: list[DnsLabel] = key(
        "namespaces whose pods may call the API inside the cluster", ["acme-etl"], default=[]
    )


class Limits(Section):
    """How much of the cluster the stack takes at most."""

    max_running_jobs: Count = key("batches that run at the same time", 4, default=2, unit="jobs")
    job_cpus: Count | None = key(
        "CPUs of all jobs together; without it those of all its pools", 64, default=None, unit="CPUs"
    )
    job_memory_gib: Count | None = key(
        "memory of all jobs together; without it that of all its pools", 480, default=None, unit="GiB"
    )
    job_gpus: Annotated[int, Field(ge=0)] | None = key(
        "GPUs of all jobs together; without it those of all its pools", 8, default=None, unit="GPUs"
    )


class Jobs(Section):
    """What KubeRay does with a batch's Ray cluster."""

    deadline_h: Annotated[int, Field(ge=1, le=24 * 7)] = key(
        "the longest that one attempt runs before it is stopped", 24, default=24, unit="hours"
    )
    start_limit_s: Annotated[int, Field(ge=60)] = key(
        "how long head and first worker may take to start, with the pull of the image, and how long a batch waits "
        "where none of the `nodes` of its GPU pool is there",
        3600,
        default=1800,
        unit="seconds",
    )
    stuck_limit_s: Annotated[int, Field(ge=10)] = key(
        "how long a pod may be unable to start for want of an image, a Secret or a volume before its batch fails",
        600,
        default=300,
        unit="seconds",
    )
    idle_timeout_s: Count = key("how long a worker without work is kept", 120, default=60, unit="seconds")
    keep_finished_s: Annotated[int, Field(ge=300)] = key(
        "how long the RayJob of a finished batch can still be looked at", 3600, default=600, unit="seconds"
    )


class KubernetesApi(Section):
    """Where pods reach the cluster's API server; a network policy cannot name it otherwise."""

    networks: Cidrs = key("the addresses of `kubectl get endpointslices -n default`", ["10.0.0.10/32"])
    port: Port = key("its port there", 6443, default=6443)


class Network(Section):
    """What pods may reach beyond each other. Everything else is refused."""

    kubernetes_api: KubernetesApi = key("see below", {})
    dns_namespace: DnsLabel = key("where the cluster's DNS runs", "kube-system", default="kube-system")
    dns_networks: list[Cidr] = key(
        "where else pods are sent for names, as by NodeLocal DNSCache: the `nameserver` in a pod's /etc/resolv.conf",
        ["169.254.20.10/32"],
        default=[],
    )
    webhook_networks: list[Cidr] = key(
        "where webhooks may go, on port 443; without any none is delivered", ["10.40.0.0/16"], default=[]
    )
    endpoint_networks: list[Cidr] = key(
        "where the endpoints of models in the http lane are", ["10.50.0.10/32"], default=[]
    )
    monitoring_namespace: DnsLabel | None = key(
        "where Prometheus runs, which may read /metrics", "monitoring", default=None
    )
