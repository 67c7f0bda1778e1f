"""Values of a stack file that the checks need.

`pulumi preview` checks the file. This reader takes what it needs and accepts everything else: nothing of the service
imports ``infra``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from ray_job.contract.accelerators import Accelerator, ImageVariant
from ray_job.contract.cluster import GATEWAY_LISTENER, INGRESS_CONTROLLERS, POOL_LABEL
from service.errors import SettingsError
from service.model_catalogue import accelerator_table, parse_accelerators

_PREFIX: Final = "cloister:"
_CPU_POOLS: Final = ("system", "cpu")
_VARIANTS: Final[tuple[ImageVariant, ...]] = ("cpu", "v100", "cuda13")
# Defaults of docs/configuration.md.
_START_LIMIT_S: Final = 1800
_API_PORT: Final = 6443


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A node pool.

    Attributes:
        name: ``system``, ``cpu`` or the name of a GPU pool.
        nodes: the names of its nodes; empty if an autoscaler creates them.
        labels: the labels of its nodes.
        images: the images that its pods run.
        accelerator: the GPU; None in pools without GPUs.
        runtime_class: the RuntimeClass of pods that request a GPU; empty for the nodes' default runtime.
    """

    name: str
    nodes: tuple[str, ...]
    labels: Mapping[str, str]
    images: tuple[str, ...]
    accelerator: Accelerator | None = None
    runtime_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """Values of a stack file.

    Attributes:
        path: the file.
        context: context of the kubeconfig.
        kubeconfig: path of the kubeconfig; None for $KUBECONFIG or ~/.kube/config.
        instance: ``acme-prod``.
        service_image: image of the service's pods.
        pools: the node pools.
        network_plugin: ``kubernetes``, ``calico`` or ``cilium``: the kind of policy that allows the API server.
        api_networks: addresses of the API server, which plain policies allow.
        api_port: its port at these addresses.
        dns_namespace: namespace of the cluster's DNS.
        dns_networks: further DNS servers.
        storage_classes: storage classes of the stack's volumes, with the key of each; empty for the cluster's default.
        start_limit_s: how long a job's pods may take to start, with the pull of the image.
        ingress_class: the ingress class; empty without an ingress.
        gateway: namespace and name of the Gateway; empty without one.
        gateway_listener: the listener of the Gateway that serves the API.
        controller_namespace: namespace of the pods that forward requests to the API; empty if none selects them.
        installs_device_plugin: whether the stack installs NVIDIA's device plugin.
        registry: registry and account of the pull secret; None without one.
    """

    path: Path
    context: str
    kubeconfig: Path | None
    instance: str
    service_image: str
    pools: tuple[Pool, ...]
    network_plugin: str
    api_networks: tuple[str, ...]
    api_port: int
    dns_namespace: str
    dns_networks: tuple[str, ...]
    storage_classes: Mapping[str, str]
    start_limit_s: int
    ingress_class: str
    gateway: str
    gateway_listener: str
    controller_namespace: str
    installs_device_plugin: bool
    registry: tuple[str, str] | None

    @property
    def namespace(self) -> str:
        """``cloister-acme-prod``: the service namespace."""
        return f"cloister-{self.instance}"


def read_stack_facts(path: Path) -> StackFacts:
    """Read a stack file.

    Raises:
        SettingsError: the file cannot be read, or lacks what every stack file has.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        values = {str(key).removeprefix(_PREFIX): value for key, value in raw["config"].items()}
        return _facts(path, values)
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}. Name a stack file, Pulumi.<stack>.yaml"
        ) from error
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        detail = f"{error} is missing or invalid" if isinstance(error, LookupError) else type(error).__name__
        raise SettingsError(
            f"{path} is not a complete stack file ({detail}): `pulumi preview` lists its errors"
        ) from error


def _facts(path: Path, values: Mapping[str, Any]) -> StackFacts:
    images, network, cluster = values["images"], values["network"], values["kubernetes"]
    server, api = network.get("kubernetes_api") or {}, values.get("api") or {}
    ingress, gateway = api.get("ingress") or {}, api.get("gateway") or {}
    defaults = INGRESS_CONTROLLERS[ingress["controller"] if ingress else "custom"]
    access = ingress or gateway
    default_namespace = "" if access.get("controller_networks") else defaults.namespace
    mirror, login = str(images.get("mirror") or ""), images.get("pull_secret")
    return StackFacts(
        path=path,
        context=str(cluster["context"]),
        kubeconfig=Path(cluster["kubeconfig"]).expanduser() if cluster.get("kubeconfig") else None,
        instance=f"{values['customer']}-{values['environment']}",
        service_image=_mirrored(images["service"], mirror),
        pools=_pools(values, mirror),
        network_plugin=str(network.get("plugin", "kubernetes")),
        api_networks=tuple(server.get("networks", ())),
        api_port=int(server.get("port", _API_PORT)),
        dns_namespace=str(network.get("dns_namespace", "kube-system")),
        dns_networks=tuple(network.get("dns_networks", ())),
        storage_classes={
            f"{section}.volume.storage_class": str((held.get("volume") or {}).get("storage_class") or "")
            for section in ("database", "object_store")
            if (held := values.get(section) or {}).get("kind", "bundled") in ("bundled", "cloudnative_pg")
        },
        start_limit_s=int((values.get("jobs") or {}).get("start_limit_s", _START_LIMIT_S)),
        ingress_class=str(ingress.get("class_name") or defaults.class_name),
        gateway=str(gateway.get("gateway", "")),
        gateway_listener=str(gateway.get("section_name", GATEWAY_LISTENER)),
        controller_namespace=str(access.get("controller_namespace") or default_namespace),
        installs_device_plugin=bool((values.get("device_plugin") or {}).get("install")),
        registry=(str(login["registry"]), str(login["username"])) if login else None,
    )


def _pools(values: Mapping[str, Any], mirror: str) -> tuple[Pool, ...]:
    """Return the pools that have nodes, with the images that their pods run.

    Ray heads run in the pool ``cpu``, of models on any accelerator. Without it they run on spare CPUs of GPU nodes, and
    so do the service's pods without a pool ``system`` either.
    """
    images, sections = values["images"], values["node_pools"]
    service = _mirrored(images["service"], mirror)
    named = {variant: images.get(f"ray_{variant}") for variant in _VARIANTS}
    ray = {variant: _mirrored(held["image"], mirror) for variant, held in named.items() if held}
    accelerators = accelerator_table(parse_accelerators(values.get("accelerators") or {})[0])
    pools = []
    for name, pool in sections.items():
        if not isinstance(pool, Mapping):
            continue
        accelerator = None
        if name not in _CPU_POOLS:
            accelerator = accelerators[pool.get("accelerator") or name]
            accelerator = replace(accelerator, resource=pool.get("resource") or accelerator.resource)
        runtime_class = pool.get("runtime_class") or sections.get("runtime_class")
        used = [service] if name == "system" else []
        if accelerator:
            used.append(ray[accelerator.image_variant])
        if name == "cpu" or ("cpu" not in sections and pool.get("spare_cpus")):
            used += [*ray.values(), *([] if "system" in sections else [service])]
        pools.append(
            Pool(
                name=str(name),
                nodes=tuple(pool.get("nodes") or ()),
                labels=pool.get("selector") or {POOL_LABEL: str(name)},
                images=tuple(dict.fromkeys(used)),
                accelerator=accelerator,
                runtime_class=str(runtime_class or "") if accelerator else "",
            )
        )
    return tuple(pools)


def _mirrored(image: str, mirror: str) -> str:
    """Return an image from the mirror, which replaces the registry's host."""
    mirror = mirror.strip("/")
    if not mirror or image.startswith(f"{mirror}/"):
        return image
    registry, _, name = image.partition("/")
    has_host = "." in registry or ":" in registry or registry == "localhost"
    return f"{mirror}/{name if has_host else image}"
