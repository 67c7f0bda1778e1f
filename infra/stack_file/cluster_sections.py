"""Sections of a stack file about the cluster: access, network, images, node pools, device plugin and KubeRay."""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import ConfigDict

from infra.capacity.pools import IMAGE_VARIANTS, NodePool, RayImage
from infra.kubernetes.images import ImageReference
from infra.stack_file.values import Cidr, Cidrs, DnsLabel, Image, Nodes, Port, Registry, WebUrl
from ray_job.contract.accelerators import CPU, Accelerator, ImageVariant
from service.config_sections import Section, key
from service.model_catalogue import Count

_EXAMPLE_DIGEST: Final = "sha256:" + "0123456789abcdef" * 4


class KubernetesSection(Section):
    """The cluster that the stack is deployed to."""

    context: str = key("context of the kubeconfig; the current context is never used", "factory")
    kubeconfig: str | None = key(
        "path of the kubeconfig; without it and without the secret `kubeconfig`: $KUBECONFIG or ~/.kube/config",
        "~/.kube/factory",
        default=None,
    )


class KubernetesApiSection(Section):
    """Addresses of the cluster's API server. Network policies need them: they cannot select it by label."""

    networks: Cidrs = key("the addresses that `kubectl get endpointslices -n default` lists", ["10.0.0.10/32"])
    port: Port = key("its port at these addresses", 6443, default=6443)


class NetworkSection(Section):
    """Destinations that pods may reach besides each other. All other traffic is refused."""

    kubernetes_api: KubernetesApiSection = key("see below", {})
    dns_namespace: DnsLabel = key("namespace of the cluster's DNS", "kube-system", default="kube-system")
    dns_networks: list[Cidr] = key(
        "further DNS servers, as of NodeLocal DNSCache: the `nameserver` in a pod's /etc/resolv.conf",
        ["169.254.20.10/32"],
        default=[],
    )
    webhook_networks: list[Cidr] = key(
        "destinations of webhooks, on port 443; without any, no webhook is delivered", ["10.40.0.0/16"], default=[]
    )
    oidc_networks: list[Cidr] = key(
        "addresses of `oidc.jwks_url`, which API pods may reach on port 443", ["10.60.0.10/32"], default=[]
    )
    endpoint_networks: list[Cidr] = key("endpoints of models in the http engine", ["10.50.0.10/32"], default=[])
    monitoring_namespace: DnsLabel | None = key(
        "namespace of Prometheus, which may read /metrics", "monitoring", default=None
    )


class PullSecretSection(Section):
    """The account that pulls images. Its password is the secret `registry_password`."""

    registry: Registry = key("host of the registry, with its port", "registry.acme.example")
    username: str = key("name of the account", "cloister-pull")


class RayImageSection(Section):
    """The image of a variant. State its versions if they differ from those that the variant's Containerfile pins."""

    image: Image = key("the image", f"registry.acme.example/cloister/ray-cuda13@{_EXAMPLE_DIGEST}")
    ray: str | None = key("its version of Ray; without it the variant's", "2.60.0", default=None)
    vllm: str | None = key("its version of vLLM; without it the variant's", "0.29.0", default=None)


class ImagesSection(Section):
    """Every image, by digest: the cluster runs what was reviewed."""

    RENAMED: ClassVar[Mapping[str, str]] = {"ray_a10g": "ray_cuda13"}

    service: Image = key("API, reconciler and migrations", f"registry.acme.example/cloister/service@{_EXAMPLE_DIGEST}")
    ray_cpu: RayImageSection | None = key("Ray and vLLM for CPUs; see below", {}, default=None)
    ray_v100: RayImageSection | None = key("Ray and vLLM for GPUs older than 7.5; see below", {}, default=None)
    ray_cuda13: RayImageSection | None = key("Ray and vLLM for GPUs from 7.5; see below", {}, default=None)
    postgres: Image | None = key(
        "the database: bundled, the official image on Debian; CloudNativePG, one of its operand images",
        f"registry.acme.example/mirror/library/postgres@{_EXAMPLE_DIGEST}",
        default=None,
    )
    versitygw: Image | None = key(
        "the bundled object store", f"registry.acme.example/mirror/versity/versitygw@{_EXAMPLE_DIGEST}", default=None
    )
    kuberay_operator: Image | None = key(
        "KubeRay's operator, if this stack installs it",
        f"registry.acme.example/mirror/kuberay/operator@{_EXAMPLE_DIGEST}",
        default=None,
    )
    device_plugin: Image | None = key(
        "NVIDIA's device plugin, if this stack installs it",
        f"registry.acme.example/mirror/nvidia/k8s-device-plugin@{_EXAMPLE_DIGEST}",
        default=None,
    )
    mirror: Registry | None = key(
        "pull every image from here instead; replaces the registry's host in each reference",
        "registry.acme.example/mirror",
        default=None,
    )
    pull_secret: PullSecretSection | None = key(
        "the account that pulls images; without it, images are pulled anonymously", {}, default=None
    )

    def mirrored(self, image: ImageReference | None) -> ImageReference:
        """Return an image of this section from the mirror, if the stack has one.

        Raises:
            ValueError: the section lacks the image (the rules of a stack file refuse that earlier).
        """
        if image is None:
            raise ValueError("the stack file names no image for this component")
        return image.mirrored(self.mirror or "")

    @property
    def ray(self) -> dict[ImageVariant, RayImage]:
        """The Ray images by variant, from the mirror if the stack has one."""
        named: dict[ImageVariant, RayImageSection | None] = {
            "cpu": self.ray_cpu,
            "v100": self.ray_v100,
            "cuda13": self.ray_cuda13,
        }
        return {
            variant: RayImage(
                reference=str(self.mirrored(image.image)),
                ray=image.ray or IMAGE_VARIANTS[variant].ray,
                vllm=image.vllm or IMAGE_VARIANTS[variant].vllm,
            )
            for variant, image in named.items()
            if image is not None
        }


_MAX_NODES: Final = "the most nodes that an autoscaler or a managed node group creates, with the pool's label and taint"
_ALLOCATABLE: Final = "of one node: its Allocatable, less what DaemonSets request there"


class SystemPoolSection(Section):
    """Nodes of the API, reconciler, operator, database and object store."""

    nodes: Nodes | None = key(
        "names of the nodes, as `kubectl get nodes` lists them; this or `max_nodes`", ["sys-1", "sys-2"], default=None
    )
    max_nodes: Count | None = key(_MAX_NODES, 3, default=None, unit="nodes")


class CpuPoolSection(Section):
    """Nodes of Ray heads, of CPU stages, and of models on CPUs."""

    nodes: Nodes | None = key("names of the nodes; this or `max_nodes`", ["cpu-1", "cpu-2"], default=None)
    max_nodes: Count | None = key(_MAX_NODES, 4, default=None, unit="nodes")
    cpus: Count = key(_ALLOCATABLE, 16, unit="CPUs")
    memory_gib: Count = key(_ALLOCATABLE, 60, unit="GiB")
    max_workers: Count = key("the most CPU workers of one job", 4, default=2, unit="pods")


class GpuPoolSection(Section):
    """Nodes with one kind of GPU. The key is the name of the accelerator."""

    nodes: Nodes | None = key("names of the nodes; this or `max_nodes`", ["v100-1", "v100-2"], default=None)
    max_nodes: Count | None = key(_MAX_NODES, 8, default=None, unit="nodes")
    gpus_per_node: Count = key("GPUs or MIG slices of one node", 4, unit="GPUs")
    gpu_memory_gib: Count | None = key(
        "use less memory of a GPU than the accelerator has; a larger value has no effect", 16, default=None, unit="GiB"
    )
    cpus: Count = key(_ALLOCATABLE, 32, unit="CPUs")
    memory_gib: Count = key(_ALLOCATABLE, 240, unit="GiB")
    max_workers: Count = key("the most GPU workers of one job", 4, default=2, unit="pods")


class NodePoolsSection(Section):
    """Nodes by their use. Exactly one stack of a cluster labels and taints them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, GpuPoolSection]

    manage_nodes: bool = key(
        "label and taint the nodes; `false` if another stack or the cluster's own tools do that", False, default=True
    )
    system: SystemPoolSection = key("see below", {})
    cpu: CpuPoolSection = key("see below", {})

    def pools(self, accelerators: Mapping[str, Accelerator]) -> dict[str, NodePool]:
        """Return the pools by name, GPU pools in the order of the accelerator table."""
        pools = {
            "system": NodePool(
                name="system", nodes=tuple(self.system.nodes or ()), max_nodes=self.system.max_nodes or 0
            )
        }
        sections: dict[str, CpuPoolSection | GpuPoolSection] = {"cpu": self.cpu}
        sections |= {name: self.__pydantic_extra__[name] for name in accelerators if name in self.__pydantic_extra__}
        for name, pool in sections.items():
            gpu = pool if isinstance(pool, GpuPoolSection) else None
            pools[name] = NodePool(
                name=name,
                accelerator=accelerators[name] if gpu else CPU,
                nodes=tuple(pool.nodes or ()),
                max_nodes=pool.max_nodes or 0,
                cpus=pool.cpus,
                memory_gib=pool.memory_gib,
                gpus_per_node=gpu.gpus_per_node if gpu else 0,
                gpu_memory_limit_mib=(gpu.gpu_memory_gib or 0) * 1024 if gpu else 0,
                max_workers=pool.max_workers,
            )
        return pools


class DevicePluginSection(Section):
    """NVIDIA's device plugin. Exactly one stack of a cluster installs it, or the cluster's own tools do."""

    install: bool = key("run it on the nodes of the GPU pools", True, default=False)


class KubeRayChartSection(Section):
    """Source of the operator's Helm chart."""

    repository: WebUrl = key(
        "the Helm repository, https:// or oci://",
        "oci://registry.acme.example/charts",
        default="https://ray-project.github.io/kuberay-helm",
    )
    version: str = key("version of the chart", "1.6.1", default="1.6.1")


class KubeRaySection(Section):
    """KubeRay's operator. Exactly one stack of a cluster installs it, or the cluster's own tools do."""

    install: Literal["helm", "none"] = key("install its Helm chart, or nothing", "none", default="helm")
    namespace: DnsLabel = key("namespace of the operator", "kuberay", default="kuberay-system")
    chart: KubeRayChartSection = key("see below", {}, default=KubeRayChartSection())
