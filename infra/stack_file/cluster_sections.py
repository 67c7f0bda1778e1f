"""Sections of a stack file about the cluster: access, network, images, node pools, device plugin and KubeRay."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from infra.capacity.pools import IMAGE_VARIANTS, NodePool, RayImage, gpu_taint
from infra.kubernetes.images import ImageReference
from infra.kubernetes.naming import StackNames
from infra.stack_file.values import (
    Cidr,
    Customer,
    DnsLabel,
    Environment,
    HostName,
    Image,
    Nodes,
    Port,
    Registry,
    WebUrl,
)
from ray_job.contract.accelerators import Accelerator, ImageVariant
from service.config_sections import Section, key
from service.model_catalogue import Count

NetworkPlugin = Literal["kubernetes", "calico", "cilium"]

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
    """Addresses of the cluster's API server. A plain NetworkPolicy needs them: it cannot select the server by label."""

    networks: list[Cidr] = key(
        "the addresses that `kubectl get endpointslices -n default` lists; required for `network.plugin: kubernetes`, "
        "not used by the others, which know the API server",
        ["10.0.0.10/32"],
        default=[],
    )
    port: Port = key("its port at these addresses; Calico takes it from the Service `kubernetes`", 6443, default=6443)


class NetworkSection(Section):
    """Destinations that pods may reach besides each other. All other traffic is refused."""

    RENAMED: ClassVar[Mapping[str, str]] = {"monitoring_namespace": "the section monitoring with its key namespace"}

    plugin: NetworkPlugin = key(
        "the plugin that enforces network policies; `kubernetes` for any that enforces NetworkPolicy and matches nodes "
        "by address. `cilium` (1.15 or newer) needs its DNS proxy for `webhook_hosts` and `oidc_hosts`. `calico` "
        "(3.20 or newer) needs the API projectcalico.org/v3",
        "cilium",
        default="kubernetes",
    )
    kubernetes_api: KubernetesApiSection = key("see below", {}, default=KubernetesApiSection())
    dns_namespace: DnsLabel = key("namespace of the cluster's DNS", "kube-system", default="kube-system")
    dns_networks: list[Cidr] = key(
        "further DNS servers, as of NodeLocal DNSCache: the `nameserver` in a pod's /etc/resolv.conf",
        ["169.254.20.10/32"],
        default=[],
    )
    webhook_networks: list[Cidr] = key(
        "destinations of webhooks, on port 443; without any, no webhook is delivered", ["10.40.0.0/16"], default=[]
    )
    webhook_hosts: list[HostName] = key(
        "destinations of webhooks by name, on port 443, with Cilium only. One with a private address needs its network "
        "in `webhook_networks` too",
        ["hooks.acme.example"],
        default=[],
    )
    oidc_networks: list[Cidr] = key(
        "addresses of `oidc.jwks_url`, which API pods may reach on port 443", ["10.60.0.10/32"], default=[]
    )
    oidc_hosts: list[HostName] = key(
        "host of `oidc.jwks_url`, which API pods may reach on port 443, with Cilium only",
        ["login.acme.example"],
        default=[],
    )
    endpoint_networks: list[Cidr] = key("endpoints of models in the http engine", ["10.50.0.10/32"], default=[])


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

    service: Image | None = key(
        "API, reconciler and migrations; required unless the layer is `platform`",
        f"registry.acme.example/cloister/service@{_EXAMPLE_DIGEST}",
        default=None,
    )
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


class TaintSection(Section):
    """A taint that the nodes of a pool have, or get where the stack manages them."""

    value: str = key("its value", "a10g", default="")
    effect: Literal["NoSchedule", "NoExecute"] = key("its effect", "NoExecute", default="NoSchedule")
    key: str = key("its key", "acme.example/gpu")


class TolerationSection(Section):
    """A further toleration of the pods of a pool."""

    operator: Literal["Exists", "Equal"] = key("how the taint is compared", "Equal", default="Exists")
    value: str = key("value of the taint, for Equal", "ml", default="")
    effect: Literal["NoSchedule", "NoExecute"] = key("effect of the taint", "NoExecute", default="NoSchedule")
    key: str = key("key of the taint", "acme.example/team")


class GpuPoolSection(Section):
    """Nodes with one kind of GPU. The key is the name of the pool."""

    accelerator: str | None = key(
        "the accelerator of its nodes; without it the pool has the name of its accelerator. Several pools may have the "
        "same one: engines run in all of them",
        "a10g",
        default=None,
    )
    nodes: Nodes | None = key("names of the nodes; this or `max_nodes`", ["v100-1", "v100-2"], default=None)
    max_nodes: Count | None = key(_MAX_NODES, 8, default=None, unit="nodes")
    selector: dict[str, str] = key(
        "labels that the nodes have already, instead of the label of the pool; needs `max_nodes`",
        {"nvidia.com/gpu.product": "NVIDIA-A10G"},
        default={},
    )
    taint: Literal["managed", "none"] | TaintSection = key(
        "`managed`: the nodes have, or get, the taint nvidia.com/gpu=present:NoSchedule; `none`: no taint; or the one "
        "below",
        "none",
        default="managed",
    )
    tolerations: list[TolerationSection] = key("further tolerations; see below", [], default=[])
    runtime_class: DnsLabel | None = key(
        "RuntimeClass of pods that request a GPU; without it `node_pools.runtime_class`", "nvidia", default=None
    )
    resource: str | None = key(
        "extended resource that its pods request; without it that of the accelerator", "nvidia.com/a10g", default=None
    )
    environment: dict[str, str] = key(
        "variables of its workers for communication between GPUs (`NCCL_`, `TORCH_NCCL_`, `GLOO_`, `UCX_`, `FI_`)",
        {"NCCL_SOCKET_IFNAME": "bond0"},
        default={},
    )
    spare_cpus: Annotated[int, Field(ge=0)] = key(
        "CPUs of one node that engines leave to other pods: Ray heads and CPU workers without a pool `cpu`, and the "
        "service without a pool `system`",
        8,
        default=0,
        unit="CPUs",
    )
    spare_memory_gib: Annotated[int, Field(ge=0)] = key(
        "memory of one node that engines leave to the same pods", 32, default=0, unit="GiB"
    )
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
    runtime_class: DnsLabel | None = key(
        "RuntimeClass of pods that request a GPU, and of the device plugin. k3s and RKE2 need `nvidia` unless NVIDIA's "
        "GPU operator 25.10 or newer runs there",
        "nvidia",
        default=None,
    )
    system: SystemPoolSection | None = key(
        "see below; without it these pods run in the pool `cpu`, or on spare CPUs of GPU nodes", {}, default=None
    )
    cpu: CpuPoolSection | None = key(
        "see below; without it these pods run on spare CPUs of GPU nodes", {}, default=None
    )

    @property
    def gpu_pools(self) -> Mapping[str, GpuPoolSection]:
        """The GPU pools by name."""
        return self.__pydantic_extra__

    def pools(self, accelerators: Mapping[str, Accelerator]) -> dict[str, NodePool]:
        """Return the pools by name: ``system``, ``cpu``, then GPU pools in the order of the accelerator table."""
        names = list(accelerators)
        gpu = {
            name: self._gpu_pool(name, section, accelerators[section.accelerator or name])
            for name, section in self.gpu_pools.items()
            if (section.accelerator or name) in accelerators
        }
        ordered = sorted(gpu.values(), key=lambda pool: names.index(pool.accelerator.name))
        with_spare = tuple(pool for pool in ordered if pool.spare_cpus and pool.spare_memory_gib)
        cpu = NodePool(
            name="cpu",
            hosts=with_spare,
            cpus=min((pool.spare_cpus for pool in with_spare), default=0),
            memory_gib=min((pool.spare_memory_gib for pool in with_spare), default=0),
        )
        if self.cpu is not None:
            cpu = NodePool(
                name="cpu",
                nodes=tuple(self.cpu.nodes or ()),
                max_nodes=self.cpu.max_nodes or 0,
                cpus=self.cpu.cpus,
                memory_gib=self.cpu.memory_gib,
                max_workers=self.cpu.max_workers,
            )
        system = NodePool(name="system", hosts=cpu.hosts or (cpu,))
        if self.system is not None:
            system = NodePool(name="system", nodes=tuple(self.system.nodes or ()), max_nodes=self.system.max_nodes or 0)
        return {"system": system, "cpu": cpu, **{pool.name: pool for pool in ordered}}

    def _gpu_pool(self, name: str, section: GpuPoolSection, accelerator: Accelerator) -> NodePool:
        resource = section.resource or accelerator.resource
        taint: dict[str, str] = {}
        if isinstance(section.taint, TaintSection):
            taint = section.taint.model_dump()
        elif section.taint == "managed":
            taint = gpu_taint(resource)
        return NodePool(
            name=name,
            accelerator=replace(accelerator, resource=resource),
            nodes=tuple(section.nodes or ()),
            max_nodes=section.max_nodes or 0,
            cpus=section.cpus,
            memory_gib=section.memory_gib,
            gpus_per_node=section.gpus_per_node,
            gpu_memory_limit_mib=(section.gpu_memory_gib or 0) * 1024,
            max_workers=section.max_workers,
            selector=section.selector,
            taint=taint,
            tolerations=tuple(
                each.model_dump(exclude={"value"} if each.operator == "Exists" else None)
                for each in section.tolerations
            ),
            runtime_class=section.runtime_class or self.runtime_class or "",
            environment=section.environment,
            spare_cpus=section.spare_cpus,
            spare_memory_gib=section.spare_memory_gib,
        )


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
    skip_crds: bool = key(
        "leave KubeRay's custom resource definitions out of the stack: they are installed before it and stay after it, "
        "and previews are faster (docs/how-to/deploy.md)",
        True,
        default=False,
    )


class CustomerSection(Section):
    """A stack of a customer, which may use the platform."""

    customer: Customer = key("the customer", "acme")
    environment: Environment = key("the stack among the customer's stacks", "prod")
    nodes: list[str] = key(
        "nodes of the pools that run pods of this customer only; its stacks need `isolation: nodes`",
        ["gpu-3", "gpu-4"],
        default=[],
    )

    @property
    def names(self) -> StackNames:
        """The names of the customer's stack."""
        return StackNames(customer=self.customer, environment=self.environment)


class PlatformSection(Section):
    """The platform that a customer's stack uses. Give one of the keys."""

    stack: str | None = key(
        "Pulumi's fully qualified name of the platform's stack, if the state of both is in one backend",
        "organization/cloister/platform",
        default=None,
    )
    kuberay_namespace: DnsLabel | None = key(
        "the output `kuberay_namespace` of the platform's stack, if its state is elsewhere",
        "kuberay-system",
        default=None,
    )


class KubeRaySection(Section):
    """KubeRay's operator. Exactly one stack of a cluster installs it, or the cluster's own tools do."""

    install: Literal["helm", "none"] = key("install its Helm chart, or nothing", "none", default="helm")
    namespace: DnsLabel = key("namespace of the operator", "kuberay", default="kuberay-system")
    chart: KubeRayChartSection = key("see below", {}, default=KubeRayChartSection())
